"""`raypd train`: Ray Train runs the trainer on every worker.

The driver shows the progress, watches the budget and the deadline, and stores the bill and the
weights.
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

from raypd import storage, text
from raypd.billing import RESERVE_SECONDS, BudgetReached, book
from raypd.cluster import ledger_actor, ray_session
from raypd.config import RunConfig
from raypd.errors import ConfigError, InputError, ModelError, RunError, UserError
from raypd.models import check_gpu
from raypd.run import (
    Curve,
    TemporaryFolder,
    TrainingAttempt,
    TrainingData,
    TrainingProgress,
    TrainingRecord,
    console,
    layout,
    manifest,
    records,
)
from raypd.tasks import (
    TrainedOn,
    calibration as tasks_calibration,
    check_task,
    check_template,
    trained_on_of,
    write_card,
)
from raypd.training.data import check_input, check_training, prepare
from raypd.training.weights import check_weights, export, kind_of_weights, load_for_training

_SHOWN_SECONDS = 1.0  # between two lines of progress
_CHECK_SECONDS = 3.0  # between two checks of the budget and the deadline
_KINDS = {kind.__name__: kind for kind in (ConfigError, InputError, ModelError)}


@dataclass
class _Outcome:
    """The outcome of one learning rate."""

    attempt: TrainingAttempt
    data: TrainingData
    trained_on: TrainedOn
    checkpoint: Any  # Ray Train's, with the lowest validation loss


def run_training(
    config: RunConfig,
    *,
    verbose: bool = False,
    say: text.Say = console.say,
    ends: float | None = None,
) -> TrainingRecord:
    """Train with every learning rate, or resume where the same command was interrupted.

    Args:
        config: The configuration.
        verbose: Whether Ray's own messages are shown.
        say: Shows the user a line.
        ends: The Unix time at which the training stops; None if there is no deadline.

    Returns:
        The record that was written into the output folder.

    Raises:
        ConfigError, InputError, ModelError: Before anything is trained.
        BudgetReached: If cost.budget_usd is spent or `ends` has passed.
        RunError: If the workers ended. The same command resumes from the latest checkpoint.
        Interrupted: At SIGINT or SIGTERM.
    """
    _check(config)
    output = layout.output_folder(config)
    storage.make_folder(output)
    with ray_session.connected(config.cluster, verbose):
        resources = ray_session.worker_resources(config, share_cpus=True)
        session = uuid.uuid4().hex[:12]
        ledger = ledger_actor.start(
            config, output, session, time.time(), resources.cpus, resources.gpus
        )
        earlier_bills = [bill for bill in book.bills(output) if bill.session != session]
        spent = sum(bill.usd for bill in earlier_bills)
        limits = _TrainingLimits(config, spent, ledger, ends)
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
                "interrupted; run the same command again to resume from the latest checkpoint"
            ) from None
        finally:
            ledger_actor.close(ledger)
        return _finish(config, output, outcomes)


def _check(config: RunConfig) -> None:
    """Fail in the driver, and before Ray starts, where a worker would fail."""
    storage.configure(config.storage)
    check_training(config)
    # `check_training` opened other runs, and each of them configured its own storage.
    storage.configure(config.storage)
    check_template(config.task, config.input, config.model)
    check_weights(config)
    check_task(config)
    check_input(config)


@dataclass
class _TrainingLimits:
    """The budget and the deadline of a training."""

    config: RunConfig
    spent: float  # USD of earlier sessions
    ledger: Any
    ends: float | None  # unix second of the deadline
    reached: str | None = None  # why the training has to stop

    def check(self) -> None:
        """Interrupt the main thread, as Ctrl-C does, once the budget or the time is used up."""
        if self.reached is not None:
            return
        if self.ends is not None and time.time() > self.ends:
            self.reached = (
                "cost.deadline is reached: set a later one and run the same command to resume"
            )
        elif self.config.cost.budget_usd is not None:
            self._check_budget(self.config.cost.budget_usd)
        if self.reached is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _check_budget(self, budget: float) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            standing = ray.get(self.ledger.standing.remote(), timeout=_CHECK_SECONDS)
            total = self.spent + standing.usd
            reserve = standing.usd_per_second * RESERVE_SECONDS
            if total + reserve > budget:
                self.reached = (
                    f"cost.budget_usd {text.usd(budget)} is reached ({text.usd(total)}): "
                    "raise it and run the same command to resume"
                )


def _fit(
    config: RunConfig,
    output: str,
    rate: float,
    resources: ray_session.WorkerResources,
    say: text.Say,
    limits: _TrainingLimits,
) -> _Outcome:
    """Train with one learning rate through Ray Train."""
    # Otherwise a relative path would mean another file on a worker.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    board = Queue(actor_options={"num_cpus": 0})
    curve: Curve = []
    trainer = _ray_trainer(config, output, rate, resources, board)
    workers = text.counted(config.cluster.max_workers, "worker")
    say(f"learning rate {rate:g}: {workers} starting")
    follower = threading.Thread(target=_follow, args=(board, curve, rate, say, limits), daemon=True)
    follower.start()
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _explained(error) from None
    except SystemExit:  # Ray Train ends this way at SIGINT
        raise KeyboardInterrupt from None
    finally:
        # The board is gone if the cluster is; the follower then ends with its error.
        with contextlib.suppress(ray.exceptions.RayError):
            board.put(None)
        follower.join()
    checkpoint, metrics = min(
        result.best_checkpoints, key=lambda candidate: candidate[1]["eval_loss"]
    )
    data, documents, steps, tokens = result.return_value
    attempt = TrainingAttempt(rate, metrics["eval_loss"], steps, tokens, curve)
    return _Outcome(attempt, data, documents, checkpoint)


def _ray_trainer(
    config: RunConfig,
    output: str,
    rate: float,
    resources: ray_session.WorkerResources,
    board: Queue,
) -> Any:
    """Return Ray Train's trainer for one learning rate."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig as TrainRun, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    filesystem, folder = _filesystem(config, storage.join(output, layout.CHECKPOINTS))
    workers = config.cluster.max_workers
    per_worker = {"CPU": resources.cpus}
    if resources.gpus:
        per_worker["GPU"] = resources.gpus
    # TorchTrainer opens a store that listens on every address, so a single worker does without it.
    is_distributed = workers > 1 or config.training.sharding != "none"
    trainer_class = TorchTrainer if is_distributed else DataParallelTrainer
    return trainer_class(
        _train_on_worker,
        train_loop_config={"config": config, "rate": rate, "resources": resources, "board": board},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=resources.gpus > 0, resources_per_worker=per_worker
        ),
        run_config=TrainRun(
            name=_name(config, rate),
            storage_path=folder,
            storage_filesystem=filesystem,
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"
            ),
            failure_config=FailureConfig(max_failures=2),
            worker_runtime_env={} if resources.gpus else {"env_vars": _allocator()},
        ),
    )


def _allocator() -> dict[str, str]:
    """Return the environment variables that make a CPU worker use Ray's jemalloc.

    The free lists of glibc grow without end, which makes a training on a CPU half as fast after 15
    minutes. Pages that were unused for a minute are freed; otherwise the worker grows until Ray
    ends it.
    """
    library = Path(ray.__file__).with_name("core") / "libjemalloc.so"
    if not library.is_file():  # on macOS
        return {}
    return {
        "LD_PRELOAD": str(library),
        "MALLOC_CONF": "thp:always,dirty_decay_ms:60000,muzzy_decay_ms:60000",
    }


def _name(config: RunConfig, rate: float) -> str:
    """Return the name of the checkpoints; it differs with every key that changes the weights."""
    training_keys = config.training.model_dump_json(
        exclude_defaults=True, exclude={"learning_rates", "max_skipped_share"}
    )
    identity = json.dumps([config.fingerprint(), str(config.input.path), training_keys])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return f"{rate:g}-{digest[:12]}"


def _train_on_worker(arguments: dict[str, Any]) -> tuple[TrainingData, TrainedOn, int, int]:
    """Train on one worker; Ray Train calls this function on each.

    Args:
        arguments: The `train_loop_config` of `_ray_trainer`.

    Returns:
        The description of the data, its documents, the steps, and the tokens that went through the
        model.
    """
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
        data, documents, train, validation = prepare(
            config, loaded.tokenizer, loaded.context_length
        )
    except UserError as error:
        # Ray Train passes on only text; `_explained` reads it.
        raise RuntimeError(json.dumps([type(error).__name__, str(error)])) from None
    is_first = ray.train.get_context().get_world_rank() == 0
    notify = arguments["board"].actor.put.remote if is_first else _ignore
    with TemporaryFolder("training") as scratch:
        trainer = make_trainer(
            loaded, config, train, validation, Path(scratch.path), arguments["rate"], notify
        )
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            trainer.train()
        else:
            with checkpoint.as_directory() as folder:
                latest = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
                trainer.train(resume_from_checkpoint=str(latest))
    state = trainer.state
    return data, documents, state.global_step, int(state.num_input_tokens_seen)


def _ignore(progress: TrainingProgress) -> None:
    """Drop the progress of every worker but the first."""


def _explained(error: Exception) -> UserError:
    """Return the error that a worker raised for the user; for any other error a RunError."""
    reasons = [*getattr(error, "worker_failures", {}).values(), error]
    for reason in reasons:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            name, message = json.loads(str(getattr(reason, "cause", reason)).splitlines()[-1])
            return _KINDS[name](message)
    explanation = str(reasons[0])
    last = [line for line in explanation.splitlines() if line.strip()][-1]
    if ray_session.killed_for_memory(explanation):
        # Ray's own explanation has twenty lines.
        last = f"{ray_session.KILLED_FOR_MEMORY}; a lower training.batch_size takes less"
    return RunError(
        f"a training worker ended: {last}; run the same command again to resume from the latest "
        "checkpoint"
    )


def _follow(board: Any, curve: Curve, rate: float, say: text.Say, limits: _TrainingLimits) -> None:
    """Record and show the progress that the first worker puts on the board, until None comes."""
    shown_step = 0
    next_line = 0.0  # time.monotonic() of the next line of progress
    next_check = 0.0  # and of the next check of the limits
    while True:
        if time.monotonic() > next_check:
            limits.check()
            next_check = time.monotonic() + _CHECK_SECONDS
        try:
            progress = board.get(timeout=_CHECK_SECONDS)
        except Empty:
            continue
        if progress is None:
            return
        if progress.measured != (None, None):
            curve.append((progress.step, *progress.measured))
        is_last = progress.step == progress.steps
        if progress.step > shown_step and (is_last or time.monotonic() > next_line):
            shown_step = progress.step
            next_line = time.monotonic() + _SHOWN_SECONDS
            say(f"learning rate {rate:g}: {progress.describe()}")


def _filesystem(config: RunConfig, path: str) -> tuple[Any, str]:
    """Return pyarrow's filesystem of the checkpoints (None: local), and their path in it."""
    if not storage.is_remote(path):
        return None, path
    if not path.startswith("s3://"):
        raise ConfigError(
            f"output.path {path}: a training's checkpoints go to a local folder or s3://"
        )
    requests = config.storage.requests
    filesystem = fs.S3FileSystem(region=requests.region, endpoint_override=requests.endpoint_url)
    return filesystem, path.removeprefix("s3://")


def _finish(config: RunConfig, output: str, outcomes: list[_Outcome]) -> TrainingRecord:
    """Write the weights of the best learning rate, their model card, and the training's record."""
    best = min(outcomes, key=lambda outcome: outcome.attempt.validation_loss)
    weights = storage.join(output, kind_of_weights(config))
    calibration = storage.join(weights, tasks_calibration.FILE)
    if storage.exists(calibration):  # that of weights which were trained before
        storage.delete(calibration)
    with (
        TemporaryFolder("training") as scratch,
        best.checkpoint.as_directory() as folder,
    ):
        exported = Path(scratch.path, "weights")
        export(config, Path(folder, "checkpoint"), exported)
        write_card(
            exported,
            config,
            best.data.digest,
            best.data.documents,
            best.attempt.learning_rate,
            best.attempt.validation_loss,
        )
        # The model has also seen what it had been trained on before.
        best.trained_on.merge(trained_on_of(config.model.model_dump()))
        best.trained_on.write(exported)
        for file in sorted(exported.iterdir()):
            storage.put(storage.join(weights, file.name), file.read_bytes())
    bills = book.bills(output)
    record = TrainingRecord(
        method=config.decoding.method,
        data=best.data,
        attempts=[outcome.attempt for outcome in outcomes],
        weights=weights,
        seconds=sum(bill.until - bill.began for bill in bills),
        usd=sum(bill.usd for bill in bills),
        config=manifest.recorded(config),
        versions=manifest.versions(),
    )
    records.write(storage.join(output, layout.TRAINING), record)
    return record
