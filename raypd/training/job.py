"""`raypd train`: Ray Train runs the trainer on every worker; the driver shows progress and keeps
bill and weights.
"""

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pyarrow import fs
from ray.util.queue import Empty, Queue

from raypd import storage
from raypd.billing import book
from raypd.billing.budget import BudgetReached
from raypd.cluster import ledger_actor, ray_session
from raypd.config import RunConfig
from raypd.errors import ConfigError, InputError, ModelError, RunError, UserError
from raypd.models.load import check_gpu, check_model_config
from raypd.run import console, layout, manifest, records, text
from raypd.run.temporary import TemporaryFolder
from raypd.run.training import Curve, TrainingAttempt, TrainingData, TrainingRecord
from raypd.tasks import check_task
from raypd.tasks.calibration import FILE as CALIBRATION
from raypd.tasks.card import write_card
from raypd.tasks.prompting import check_template
from raypd.training.data import check, check_input, prepare
from raypd.training.weights import export, kind_of_weights, load_for_training

_SHOWN_SECONDS = 1.0
_LOOK_SECONDS = 3.0  # between two looks at the budget and the time
# What came of a learning rate, the data, the best checkpoint.
Outcome = tuple[TrainingAttempt, TrainingData, Any]
_KINDS = {kind.__name__: kind for kind in (ConfigError, InputError, ModelError)}


def run_training(
    config: RunConfig,
    *,
    verbose: bool = False,
    say: text.Say = console.say,
    ends: float | None = None,
) -> TrainingRecord:
    """Trains with every learning rate, or goes on where the same command was cut off.

    `say` shows the user a line.

    ends: unix second at which it stops; None: it has the time that it takes. Raises ConfigError,
    InputError, ModelError before anything is trained; BudgetReached where cost.budget_usd is spent
    or `ends` has come; RunError where the workers ended (the same command goes on from the latest
    checkpoint); Interrupted at SIGINT or SIGTERM.
    """
    storage.configure(config.storage)
    check(config)
    # `check` has looked into runs, each as it reached its own storage.
    storage.configure(config.storage)
    check_template(config)
    check_model_config(config.model, machine=False)
    check_task(config)
    check_input(config)
    output = layout.output_folder(config)
    storage.make_folder(output)
    with ray_session.connected(config.cluster, verbose):
        resources = ray_session.worker_resources(config)
        session = uuid.uuid4().hex[:12]
        ledger = ledger_actor.start(
            config, output, session, time.time(), resources.cpus, resources.gpus
        )
        limits = _Limits(
            config,
            sum(bill.usd for bill in book.bills(output) if bill.session != session),
            ledger,
            ends,
        )
        try:
            outcomes = [
                _fit(config, output, rate, resources, say, limits)
                for rate in config.training.learning_rates
            ]
        except KeyboardInterrupt:
            if limits.reached is not None:
                raise BudgetReached(
                    f"{limits.reached}; what is trained is kept up to its latest checkpoint"
                ) from None
            raise console.Interrupted(
                "interrupted; the same command goes on from the latest checkpoint"
            ) from None
        finally:
            ledger_actor.close(ledger)
        return _finish(config, output, outcomes)


@dataclass
class _Limits:
    """The money and the time of a training. spent: USD of its earlier sessions; reached: why it has
    to stop.
    """

    config: RunConfig
    spent: float
    ledger: Any
    ends: float | None
    reached: str | None = None

    def look(self) -> None:
        """Stops the main thread, as Ctrl-C does, at the end of the money or of the time.

        Called again and again.
        """
        if self.reached is not None:
            return
        budget = self.config.cost.budget_usd
        if self.ends is not None and time.time() > self.ends:
            self.reached = "cost.deadline is reached: the same command with a later one goes on"
        elif budget is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                standing = ray.get(self.ledger.standing.remote(), timeout=_LOOK_SECONDS)
                total = self.spent + standing.usd
                if total + standing.usd_per_second * self.config.cost.reserve_seconds > budget:
                    self.reached = (
                        f"cost.budget_usd {text.usd(budget)} is reached "
                        f"({text.usd(total)}): the same command with "
                        "more goes on"
                    )
        if self.reached is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _fit(
    config: RunConfig,
    output: str,
    rate: float,
    resources: ray_session.WorkerResources,
    say: text.Say,
    limits: _Limits,
) -> Outcome:
    """One learning rate through Ray Train."""
    from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainRun
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    # Relative paths mean on a worker what they mean here.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    board = Queue(actor_options={"num_cpus": 0})
    curve: Curve = []
    filesystem, folder = _filesystem(config, storage.join(output, layout.CHECKPOINTS))
    per_worker = {"CPU": resources.cpus, **({"GPU": resources.gpus} if resources.gpus else {})}
    workers = config.cluster.max_workers
    best_two = CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"
    )
    # Torch's store listens on every address.
    together = workers > 1 or config.training.sharding != "none"
    trainer = (TorchTrainer if together else DataParallelTrainer)(
        _train_on_worker,
        train_loop_config={"config": config, "rate": rate, "resources": resources, "board": board},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=resources.gpus > 0, resources_per_worker=per_worker
        ),
        run_config=TrainRun(
            name=_name(config, rate),
            storage_path=folder,
            storage_filesystem=filesystem,
            checkpoint_config=best_two,
            failure_config=FailureConfig(max_failures=2),
            worker_runtime_env={} if resources.gpus else {"env_vars": _allocator()},
        ),
    )
    say(f"learning rate {rate:g}: {text.counted(workers, 'worker')} starting")
    follower = threading.Thread(target=_follow, args=(board, curve, rate, say, limits), daemon=True)
    follower.start()
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _explained(error) from None
    except SystemExit:  # Ray Train's own way to end at SIGINT
        raise KeyboardInterrupt from None
    finally:
        # The cluster has gone, and with it the follower.
        with contextlib.suppress(ray.exceptions.RayError):
            board.put(None)
        follower.join()
    checkpoint, metrics = min(result.best_checkpoints, key=lambda kept: kept[1]["eval_loss"])
    data, steps, tokens = result.return_value
    return TrainingAttempt(rate, metrics["eval_loss"], steps, tokens, curve), data, checkpoint


def _allocator() -> dict[str, str]:
    """Ray's jemalloc: glibc's free lists get ever longer, and a training on a CPU half as fast
    after 15 minutes. Pages unused for a minute are freed, or the worker grows until Ray ends it.
    """
    library = Path(ray.__file__).with_name("core") / "libjemalloc.so"
    if not library.is_file():  # macOS
        return {}
    return {
        "LD_PRELOAD": str(library),
        "MALLOC_CONF": "thp:always,dirty_decay_ms:60000,muzzy_decay_ms:60000",
    }


def _name(config: RunConfig, rate: float) -> str:
    """The name of the checkpoints: it differs with every key that changes the weights."""
    keys = config.training.model_dump_json(
        exclude_defaults=True, exclude={"learning_rates", "max_skipped_share"}
    )
    digest = hashlib.sha256(
        json.dumps([config.fingerprint(), str(config.input.path), keys]).encode()
    ).hexdigest()
    return f"{rate:g}-{digest[:12]}"


def _train_on_worker(arguments: dict[str, Any]) -> tuple[TrainingData, int, int]:
    """What every worker does: (the data, steps, tokens that went through the model)."""
    import ray.train
    import torch
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    from raypd.training.trainer import make_trainer

    config: RunConfig = arguments["config"]
    storage.configure(config.storage)
    torch.set_num_threads(arguments["resources"].threads)
    try:
        if arguments["resources"].gpus and config.model.device == "auto":
            check_gpu()
        loaded = load_for_training(config)
        data, train, validation = prepare(config, loaded.tokenizer, loaded.context_length)
    except UserError as error:
        # Ray Train hands on text alone.
        raise RuntimeError(json.dumps([type(error).__name__, str(error)])) from None
    first = ray.train.get_context().get_world_rank() == 0
    report = arguments["board"].actor.put.remote if first else lambda progress: None
    with TemporaryFolder("training") as scratch:
        trainer = make_trainer(
            loaded, config, train, validation, Path(scratch.path), arguments["rate"], report
        )
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        checkpoint = ray.train.get_checkpoint()
        with (
            contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as folder
        ):
            latest = (
                None
                if folder is None
                else str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME))
            )
            trainer.train(resume_from_checkpoint=latest)
    return data, trainer.state.global_step, int(trainer.state.num_input_tokens_seen)


def _explained(error: Exception) -> UserError:
    """The error of a worker, as it was raised there where it was meant for the user."""
    reasons = [*getattr(error, "worker_failures", {}).values(), error]
    for reason in reasons:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            name, message = json.loads(str(getattr(reason, "cause", reason)).splitlines()[-1])
            return _KINDS[name](message)
    last = [line for line in str(reasons[0]).splitlines() if line.strip()][-1]
    if "low on memory" in str(reasons[0]):  # of which Ray says twenty lines
        last = "the machine ran out of memory (a lower training.batch_tokens takes less)"
    return RunError(
        f"a training worker ended: {last}; the same command goes on from the latest checkpoint"
    )


def _follow(board: Any, curve: Curve, rate: float, say: text.Say, limits: _Limits) -> None:
    """Keeps the losses that the first worker puts on the board, and shows how far it is, until None
    comes.
    """
    shown, due, look_due = 0, 0.0, 0.0
    while True:
        if time.monotonic() > look_due:
            limits.look()
            look_due = time.monotonic() + _LOOK_SECONDS
        try:
            progress = board.get(timeout=_LOOK_SECONDS)
        except Empty:
            continue
        if progress is None:
            return
        if progress.measured != (None, None):
            curve.append((progress.step, *progress.measured))
        if progress.step > shown and (time.monotonic() > due or progress.step == progress.steps):
            shown, due = progress.step, time.monotonic() + _SHOWN_SECONDS
            say(f"learning rate {rate:g}: {progress.describe()}")


def _filesystem(config: RunConfig, path: str) -> tuple[Any, str]:
    if not storage.is_remote(path):
        return None, path
    if not path.startswith("s3://"):
        raise ConfigError(
            f"output.path {path}: a training's checkpoints go to a local folder or s3://"
        )
    section = config.storage
    return fs.S3FileSystem(
        region=section.region, endpoint_override=section.endpoint_url
    ), path.removeprefix("s3://")


def _finish(config: RunConfig, output: str, outcomes: list[Outcome]) -> TrainingRecord:
    best, data, checkpoint = min(outcomes, key=lambda outcome: outcome[0].validation_loss)
    weights = storage.join(output, kind_of_weights(config))
    # Of weights that were trained before.
    if storage.exists(calibration := storage.join(weights, CALIBRATION)):
        storage.delete(calibration)
    with (
        TemporaryFolder("training") as scratch,
        checkpoint.as_directory() as folder,
    ):
        exported = Path(scratch.path, "weights")
        export(config, Path(folder, "checkpoint"), exported)
        write_card(
            exported, config, data.digest, data.documents, best.learning_rate, best.validation_loss
        )
        for file in sorted(exported.iterdir()):
            storage.put(storage.join(weights, file.name), file.read_bytes())
    bills = book.bills(output)
    record = TrainingRecord(
        method=config.decoding.method,
        data=data,
        attempts=[attempt for attempt, *_ in outcomes],
        weights=weights,
        seconds=sum(bill.until - bill.began for bill in bills),
        usd=sum(bill.usd for bill in bills),
        config=manifest.recorded(config),
        versions=manifest.versions(),
    )
    records.write(storage.join(output, layout.TRAINING), record)
    return record
