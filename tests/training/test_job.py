"""A tiny random model is trained through Ray Train, and then decodes what it was trained on."""

import _thread
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.dataset as ds
import pytest
import ray
import torch
from safetensors.torch import load_file

from raypd.cluster.driver import run_extract
from raypd.cluster.ray_session import WorkerResources
from raypd.config.load import make_config
from raypd.config.model_card_file import CARD
from raypd.errors import InputError, ModelError
from raypd.run.console import Interrupted
from raypd.run.training import TrainingAttempt, TrainingData, TrainingProgress
from raypd.tasks.training_documents import FILE, TrainedOn, trained_on_of
from raypd.training import job
from raypd.training.job import _train_on_worker, run_training
from tests.tiny import save_tiny
from tests.training.data import tree, write_corpus

# A test starts Ray Train up to three times, beside other tests.
pytestmark = pytest.mark.timeout(900)
SHORT = {
    "weights": "lora",
    "lora": {"rank": 4},
    "learning_rates": [1e-2],
    "epochs": 8,
    "batch_size": 8,
    "evaluations": 4,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("base"), hidden_size=64))


def test_a_worker_with_a_gpu_that_it_does_not_see_does_not_train_on_the_cpu(tmp_path, monkeypatch):
    config = short(tmp_path, "no/model", "a", model={"device": "auto"})
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with pytest.raises(RuntimeError, match=r"ModelError.*was given a GPU, and torch .* sees none"):
        _train_on_worker({"config": config, "resources": WorkerResources(1, 1.0, 1)})


def test_new_weights_do_not_keep_the_calibration_of_earlier_ones(tmp_path, monkeypatch):
    config = make_config(tree(tmp_path / "corpus.jsonl", tmp_path, "base"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/calibration.json").write_text("{}")
    monkeypatch.setattr(job, "export", lambda config, checkpoint, target: target.mkdir())
    outcome = job._Outcome(
        attempt=TrainingAttempt(1e-3, 0.1, 1, 1, []),
        data=TrainingData(1, 1, 1, 1, {}, "digest"),
        trained_on=TrainedOn(),
        checkpoint=SimpleNamespace(as_directory=lambda: nullcontext("checkpoint")),
    )
    record = job._finish(config, str(tmp_path), [outcome])
    assert {file.name for file in Path(record.weights).iterdir()} == {CARD, FILE}


def test_weights_know_the_documents_of_the_weights_that_they_were_made_from(tmp_path, monkeypatch):
    base = tmp_path / "base"
    base.mkdir()
    TrainedOn(["a"], ["b"], ["title"]).write(base)
    config = make_config(tree(tmp_path / "corpus.jsonl", tmp_path, str(base)))
    monkeypatch.setattr(job, "export", lambda config, checkpoint, target: target.mkdir())
    outcome = job._Outcome(
        attempt=TrainingAttempt(1e-3, 0.1, 1, 1, []),
        data=TrainingData(1, 1, 1, 1, {}, "digest"),
        trained_on=TrainedOn(["c"], ["d"], ["title"]),
        checkpoint=SimpleNamespace(as_directory=lambda: nullcontext("checkpoint")),
    )
    record = job._finish(config, str(tmp_path), [outcome])
    known = trained_on_of({"name": record.weights})
    assert known == TrainedOn(["a", "c"], ["b", "d"], ["title"])


def ignore(line):
    pass


def right_records(config, corpus):
    """Decode a corpus; return how many records are those that it is labelled with."""
    run_extract(config)
    labels = {}
    for line in corpus.read_text().splitlines():
        row = json.loads(line)
        labels[row["id"]] = row["target"]
    rows = ds.dataset(config.output.path + "/units").to_table().to_pylist()
    records = {row["id"]: json.loads(row["record"]) for row in rows}
    return sum(records[key] == target for key, target in labels.items())


@pytest.mark.slow  # tests/fitting/test_fit.py trains and decodes, too
def test_trained_values_are_decoded_in_parallel(tmp_path, base, ray_here):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 24)
    training = {
        "weights": "full",
        "learning_rates": [3e-3],
        "epochs": 40,
        "batch_size": 24,
        "evaluations": 2,
        "validation": str(corpus),
    }
    config = make_config(tree(corpus, tmp_path / "trained", base, training=training))
    lines = []
    assert run_training(config, say=lines.append).best.validation_loss < 0.1, lines
    assert "tokens/s" in lines[-1]
    model = str(tmp_path / "trained" / "model")
    decoded = make_config(tree(corpus, tmp_path / "run", model, decoding={"isolate": "documents"}))
    assert right_records(decoded, corpus) >= 22
    other = make_config(tree(corpus, tmp_path / "other", model, decoding={"max_value_tokens": 20}))
    with pytest.raises(ModelError, match="max_value_tokens 12"):
        run_extract(other)


# A hybrid; a mixture of experts with attention sinks and sliding windows; and both in one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weights", "epochs"),
    [("qwen3_5_text", "full", 120), ("gpt_oss", "full", 40), ("lfm2_moe", "lora", 110)],
)
def test_hybrids_and_mixtures_decode_what_they_learnt(tmp_path, kind, weights, epochs, ray_here):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 24)
    base = str(save_tiny(tmp_path / "base", kind))
    training = {
        "weights": weights,
        "lora": {"rank": 32},
        "learning_rates": [3e-3 if weights == "full" else 1e-2],
        "epochs": epochs,
        "batch_size": 24,
        "evaluations": 2,
        "validation": str(corpus),
    }
    sections = {"training": training, "decoding": {"isolate": "values"}}
    record = run_training(make_config(tree(corpus, tmp_path / "trained", base, **sections)))
    model = {"name": record.weights}
    if weights == "lora":
        model = {"name": base, "adapter": record.weights}
    decoding = {"isolate": "values"}
    config = make_config(
        tree(
            corpus,
            tmp_path / "run",
            base,
            model=model,
            decoding=decoding,
        )
    )
    assert right_records(config, corpus) >= 20


def short(tmp_path, base, name, **sections):
    """Return the configuration of a training of 24 steps, with a checkpoint every six."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 24)
    training = {
        **SHORT,
        "validation": str(corpus),
        **sections.pop("training", {}),
    }
    return make_config(
        tree(
            corpus,
            tmp_path / name,
            base,
            training=training,
            **sections,
        )
    )


def cut_off(config, files):
    """Start a training, and interrupt it once a file says that a checkpoint is complete."""

    def interrupt(line):
        if any(name.endswith("checkpoint_manager_snapshot.json") for name in files()):
            _thread.interrupt_main()

    with pytest.raises(Interrupted, match="run the same command again to resume"):
        run_training(config, say=interrupt)


def step_of(line):
    return int(line.split("step ")[1].split(" ")[0])


@pytest.mark.slow
def test_an_interrupted_training_resumes_to_the_same_weights(tmp_path, base):
    whole = short(tmp_path, base, "whole")
    resumed = short(tmp_path, base, "resumed")
    run_training(whole, say=ignore)
    folder = Path(resumed.output.path)
    cut_off(resumed, lambda: map(str, folder.rglob("checkpoints/**/*")))
    assert not (folder / "adapter").exists()
    lines = []
    record = run_training(resumed, say=lines.append)
    assert record.best.steps == 24
    assert step_of(lines[-1]) == 24
    expected = load_file(Path(whole.output.path, "adapter", "adapter_model.safetensors"))
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_training_on_one_worker_listens_on_this_machine_only(tmp_path, base):
    ray.shutdown()  # the training would join a cluster of other tests
    addresses = set()

    def look(line):
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        for port in psutil.net_connections("tcp"):
            if port.status == "LISTEN" and port.pid in children:
                addresses.add(port.laddr.ip)

    run_training(short(tmp_path, base, "out"), say=look)
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("key", ["input.path", "training.validation"])
def test_a_missing_file_is_named_before_anything_starts(tmp_path, base, key, monkeypatch):
    monkeypatch.setattr(
        "raypd.training.job.ray_session.connect", lambda *_: pytest.fail("Ray is started")
    )
    section, name = key.split(".")
    config = short(tmp_path, base, "out", **{section: {name: str(tmp_path / "nothere.jsonl")}})
    with pytest.raises(InputError, match=r"nothere.jsonl: no such file"):
        run_training(config, say=ignore)
    assert not Path(config.output.path).exists()


@pytest.mark.slow
def test_the_lowest_validation_loss_wins(tmp_path, base):
    trainer = {"lr_scheduler_type": "constant"}
    training = {"learning_rates": [10.0, 1e-2], "patience": 1, "trainer": trainer}
    done = run_training(short(tmp_path, base, "out", training=training), say=ignore)
    worse, better = done.attempts
    assert done.best is better
    assert worse.validation_loss > better.validation_loss
    losses = [loss for *_, loss in better.curve if loss is not None]
    assert len(losses) == SHORT["evaluations"]  # a loss stands only at the step of its evaluation
    assert losses[-1] < losses[0]
    steps = [step for step, *_ in better.curve]
    assert steps == sorted(steps)


def validation_losses(config):
    """Train, and return the validation losses by step."""
    curve = run_training(config, say=ignore).best.curve
    return {step: loss for step, _, loss in curve if loss is not None}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_workers_do_what_one_does(tmp_path, base, sharding):
    """Passes of four examples in two workers make the same steps as two such passes in one."""
    training = {
        "weights": "full",
        "epochs": 2,
        "learning_rates": [1e-3],
        "trainer": {"max_grad_norm": 1e9, "warmup_steps": 0.5},
    }
    trainer = {**training["trainer"], "gradient_accumulation_steps": 2}
    single = short(
        tmp_path,
        base,
        "one",
        training={
            **training,
            "trainer": trainer,
            "batch_size": 4,
        },
    )
    double = short(
        tmp_path,
        base,
        "two",
        training={**training, "batch_size": 4, "sharding": sharding},
        cluster={"max_workers": 2, "min_workers": 2},
    )
    expected = validation_losses(single)
    losses = validation_losses(double)
    assert list(expected) == [2, 4, 6]
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_an_interrupted_training_on_s3_resumes_from_its_checkpoint(
    tmp_path, base, bucket, s3_server
):
    sections = {
        "output": {"path": f"{bucket}/trained"},
        "storage": {"options": {"endpoint_url": s3_server.url}},
    }
    config = short(tmp_path, base, "out", **sections)
    name = bucket.removeprefix("s3://")
    lines = []

    def keys():
        listing = s3_server.client().list_objects_v2(Bucket=name, Prefix="trained/")
        objects = listing.get("Contents", [])
        return {entry["Key"].removeprefix("trained/") for entry in objects}

    cut_off(config, keys)
    done = run_training(config, say=lines.append)
    assert {"training.json", "adapter/adapter_model.safetensors", "adapter/raypd.json"} <= keys()
    assert done.weights == f"{bucket}/trained/adapter"
    first_progress = next(line for line in lines if "step " in line)
    assert step_of(first_progress) > 6, lines


def test_a_training_shows_no_time_left_before_its_first_step() -> None:
    before = TrainingProgress(0, 100, None, None, 0, 0, 0.0)
    assert before.describe() == "step 0 of 100, 0 tokens/s"
    later = TrainingProgress(10, 100, None, None, 10, 500, 20.0)
    assert later.describe() == "step 10 of 100, 25 tokens/s, 3:00 left"
