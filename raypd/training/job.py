"""`raypd train`: Ray Train's TorchTrainer runs the trainer on every worker; the driver shows progress, keeps the bill
and puts the best weights into the run's folder.

<output>/checkpoints/<learning rate>: Ray Train's checkpoints, from which the same command goes on.
<output>/adapter or <output>/model: the weights with the lowest validation loss, with their card.
<output>/training.json: data, what was left out and why, the losses of every learning rate, time, tokens and cost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.billing import book
from raypd.cluster import ledger_actor, ray_session
from raypd.config import RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.errors import ConfigError, InputError, ModelError, RunError, UserError
from raypd.models.load import check_model_config
from raypd.models.source import find_source, read_config
from raypd.run import console, layout, manifest, records, text
from raypd.run.console import Interrupted
from raypd.run.training import Curve, TrainingAttempt, TrainingData, TrainingProgress, TrainingRecord
from raypd.tasks import check_task
from raypd.tasks.card import make_card
from raypd.tasks.prompting import check_template
from raypd.training.data import check, check_input

_LOOK_SECONDS = 1.0
_KINDS = {kind.__name__: kind for kind in (ConfigError, InputError, ModelError)}


class _Board:
    """An actor on which the first worker writes how far it is."""

    def __init__(self) -> None:
        self.latest: TrainingProgress | None = None
        self.curve: Curve = []

    def put(self, progress: TrainingProgress) -> None:
        self.latest = progress
        if progress.measured != (None, None):
            self.curve.append((progress.step, *progress.measured))

    def get(self) -> tuple[TrainingProgress | None, Curve]:
        return self.latest, self.curve


def run_training(
    config: RunConfig, *, verbose: bool = False, say: Callable[[str], None] = console.say
) -> TrainingRecord:
    """Trains with every learning rate, or goes on where the same command was cut off. `say` shows the user a line.

    Raises:
        ConfigError, InputError, ModelError: before anything is trained.
        RunError: the workers ended; the same command goes on from the latest checkpoint.
        Interrupted: at SIGINT or SIGTERM.
    """
    storage.configure(config.storage)
    check(config)
    check_template(config)
    check_model_config(config.model, machine=False)
    check_task(config)
    storage.configure(config.storage)  # `check` has looked into runs, each as it reached its own storage
    check_input(config)
    output = layout.output_folder(config)
    storage.make_folder(output)
    connected = ray_session.connect(config.cluster, verbose)
    try:
        resources = ray_session.worker_resources(config)
        session = uuid.uuid4().hex[:12]
        ledger = ledger_actor.start(config, output, session, time.time(), resources.cpus, resources.gpus)
        outcomes = []
        try:
            for rate in config.training.learning_rates:
                outcomes.append(_fit(config, output, rate, resources, say))
        finally:
            ledger_actor.close(ledger)
        return _finish(config, output, outcomes)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on from the latest checkpoint") from None
    finally:
        if connected:
            import ray

            ray.shutdown()


def _fit(
    config: RunConfig, output: str, rate: float, resources: ray_session.WorkerResources, say: Callable[[str], None]
) -> tuple[TrainingAttempt, TrainingData, Any]:
    """One learning rate through Ray Train: (what came of it, the data, the best checkpoint)."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainRun
    from ray.train.torch import TorchTrainer

    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths mean on a worker what they mean here
    board = ray.remote(_Board).options(num_cpus=0).remote()
    filesystem, folder = _filesystem(config, storage.join(output, layout.CHECKPOINTS))
    per_worker = {"CPU": resources.cpus, **({"GPU": resources.gpus} if resources.gpus else {})}
    trainer = TorchTrainer(
        _train_on_worker,
        train_loop_config={"config": config, "rate": rate, "threads": resources.threads, "board": board},
        scaling_config=ScalingConfig(
            num_workers=config.cluster.max_workers, use_gpu=resources.gpus > 0, resources_per_worker=per_worker
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
    say(f"learning rate {rate:g}: {text.counted(config.cluster.max_workers, 'worker')} starting")
    try:
        with _shown(board, rate, say):
            result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _explained(error) from None
    except SystemExit:  # Ray Train's own way to end at SIGINT
        raise KeyboardInterrupt from None
    checkpoint, metrics = min(result.best_checkpoints, key=lambda kept: kept[1]["eval_loss"])
    data, steps, tokens = result.return_value
    _, curve = ray.get(board.get.remote())
    return TrainingAttempt(rate, metrics["eval_loss"], steps, tokens, curve), data, checkpoint


def _allocator() -> dict[str, str]:
    """Ray's jemalloc instead of glibc's malloc, with which a training on a CPU is half as fast after 15 minutes.

    Tensors of many sizes make glibc's lists of free blocks ever longer. Pages that are unused for a minute are given
    back, or the worker grows until Ray ends it.
    """
    import ray

    library = Path(ray.__file__).with_name("core") / "libjemalloc.so"
    if not library.is_file():  # macOS
        return {}
    return {"LD_PRELOAD": str(library), "MALLOC_CONF": "thp:always,dirty_decay_ms:60000,muzzy_decay_ms:60000"}


def _name(config: RunConfig, rate: float) -> str:
    """The name of the checkpoints: it differs with every key that changes the weights."""
    keys = config.training.model_dump_json(exclude_defaults=True, exclude={"learning_rates", "max_skipped_share"})
    digest = hashlib.sha256(json.dumps([config.fingerprint(), str(config.input.path), keys]).encode()).hexdigest()
    return f"{rate:g}-{digest[:12]}"


def _train_on_worker(arguments: dict[str, Any]) -> tuple[TrainingData, int, int]:
    """What every worker of Ray Train does: (the data, steps, tokens that went through the model)."""
    import ray.train
    import torch
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    from raypd.training.data import prepare
    from raypd.training.trainer import load_for_training, make_trainer

    config: RunConfig = arguments["config"]
    storage.configure(config.storage)
    torch.set_num_threads(arguments["threads"])
    try:
        loaded = load_for_training(config)
        data, train, validation = prepare(config, loaded.tokenizer, loaded.context_length)
    except UserError as error:
        raise RuntimeError(json.dumps([type(error).__name__, str(error)])) from None  # Ray Train hands on text alone
    first = ray.train.get_context().get_world_rank() == 0
    report = arguments["board"].put.remote if first else lambda progress: None
    with tempfile.TemporaryDirectory(prefix="raypd-training-") as scratch:
        trainer = make_trainer(loaded, config, train, validation, Path(scratch), arguments["rate"], report)
        trainer.add_callback(RayTrainReportCallback())
        trainer = prepare_trainer(trainer)
        checkpoint = ray.train.get_checkpoint()
        with contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as folder:
            latest = None if folder is None else str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME))
            trainer.train(resume_from_checkpoint=latest)
    return data, trainer.state.global_step, int(trainer.state.num_input_tokens_seen)


def _explained(error: Exception) -> UserError:
    """The error of a worker: as it was raised there where it was meant for the user."""
    reasons = [*getattr(error, "worker_failures", {}).values(), error]
    for reason in reasons:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            name, text = json.loads(str(getattr(reason, "cause", reason)).splitlines()[-1])
            return _KINDS[name](text)
    lines = [line for line in str(reasons[0]).strip().splitlines() if line.strip()]
    return RunError(f"a training worker ended: {lines[-1]}; the same command goes on from the latest checkpoint")


@contextlib.contextmanager
def _shown(board: Any, rate: float, say: Callable[[str], None]) -> Iterator[None]:
    """Shows the training's progress during the block."""
    import ray

    ended = threading.Event()

    def look() -> None:
        shown = 0
        while not ended.wait(_LOOK_SECONDS):
            latest, _ = ray.get(board.get.remote())
            if latest is not None and latest.step > shown:
                shown = latest.step
                say(f"learning rate {rate:g}: {latest.describe()}")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _filesystem(config: RunConfig, path: str) -> tuple[Any, str]:
    """Where Ray Train writes: pyarrow's file system and the path in it."""
    from pyarrow import fs

    if not storage.is_remote(path):
        return None, path
    section = config.storage
    return fs.S3FileSystem(region=section.region, endpoint_override=section.endpoint_url), path.removeprefix("s3://")


def _finish(
    config: RunConfig, output: str, outcomes: list[tuple[TrainingAttempt, TrainingData, Any]]
) -> TrainingRecord:
    """Copies the best weights, writes their card and training.json."""
    best, data, checkpoint = min(outcomes, key=lambda outcome: outcome[0].validation_loss)
    weights = storage.join(output, _kind(config))
    with tempfile.TemporaryDirectory(prefix="raypd-training-") as scratch, checkpoint.as_directory() as folder:
        exported = Path(scratch, "weights")
        _export(config, Path(folder, "checkpoint"), exported)
        make_card(config, data.digest, data.documents, best.learning_rate, best.validation_loss).write(exported)
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


def _kind(config: RunConfig) -> str:
    """The folder's name of what is trained."""
    if REGISTRY[config.decoding.method].heads:
        return "heads"
    return "adapter" if config.training.weights == "lora" else "model"


def _export(config: RunConfig, checkpoint: Path, target: Path) -> None:
    """Writes the weights of a checkpoint in the dtype of the base model: adapter, heads or a whole model."""
    import torch
    from safetensors.torch import load_file, save_file

    from raypd.models.medusa_heads import load_heads, save_heads

    dtype = getattr(read_config(find_source(config.model)), "dtype", None) or torch.float32
    if _kind(config) == "heads":
        heads = load_heads(str(config.decoding.heads))
        heads.load_state_dict(load_file(checkpoint / "model.safetensors"))
        save_heads(heads.to(dtype), target)
        return
    if _kind(config) == "adapter":
        target.mkdir()
        shutil.copy(checkpoint / "adapter_config.json", target)
        tensors = load_file(checkpoint / "adapter_model.safetensors")
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, target / "adapter_model.safetensors")
        return
    from transformers import AutoModelForCausalLM

    from raypd.models.embedded import quiet
    from raypd.models.load import load_tokenizer

    with quiet():
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).save_pretrained(target)
    load_tokenizer(config.model).save_pretrained(target)
