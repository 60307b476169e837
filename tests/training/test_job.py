"""A tiny random model is trained through Ray Train and then decodes, through the engine, what it
was trained on.
"""

import _thread
import json
from contextlib import nullcontext
from itertools import pairwise
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
from raypd.config.card import CARD
from raypd.config.load import make_config
from raypd.errors import InputError, ModelError
from raypd.run.console import Interrupted
from raypd.run.training import TrainingAttempt, TrainingData
from raypd.training import job
from raypd.training.job import _train_on_worker, run_training
from tests.tiny import save_tiny
from tests.training.data import tree, write_corpus

pytestmark = pytest.mark.timeout(900)  # up to three starts of Ray Train, beside other tests
SHORT = {
    "weights": "lora",
    "lora_rank": 4,
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


def test_new_weights_have_not_the_calibration_of_those_before(tmp_path, monkeypatch):
    config = make_config(tree(tmp_path / "corpus.jsonl", tmp_path, "base"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/calibration.json").write_text("{}")
    monkeypatch.setattr(job, "export", lambda config, checkpoint, target: target.mkdir())
    checkpoint = SimpleNamespace(as_directory=lambda: nullcontext("checkpoint"))
    outcome = (
        TrainingAttempt(1e-3, 0.1, 1, 1, []),
        TrainingData(1, 1, 1, 1, {}, "digest"),
        checkpoint,
    )
    assert [
        file.name for file in Path(job._finish(config, str(tmp_path), [outcome]).weights).iterdir()
    ] == [CARD]


@pytest.mark.slow  # tests/fitting/test_fit.py trains and decodes, too
def test_trained_values_are_decoded_in_parallel(tmp_path, base, ray_here):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 24)
    training = {
        "weights": "full",
        "learning_rates": [3e-3],
        "epochs": 40,
        "batch_size": 24,
        "evaluations": 2,
    }
    training["validation"] = str(corpus)
    config = make_config(tree(corpus, tmp_path / "trained", base, training=training))
    lines = []
    assert run_training(config, say=lines.append).best.validation_loss < 0.1, lines
    assert "tokens/s" in lines[-1]
    model = str(tmp_path / "trained" / "model")
    decoded = make_config(tree(corpus, tmp_path / "run", model, decoding={"isolate": "documents"}))
    run_extract(decoded)
    want = {row["id"]: row["target"] for row in map(json.loads, corpus.read_text().splitlines())}
    rows = ds.dataset(decoded.output.path + "/units").to_table().to_pylist()
    got = {row["id"]: json.loads(row["record"]) for row in rows}
    assert sum(got[key] == target for key, target in want.items()) >= 22, (got, want)
    with pytest.raises(ModelError, match="max_value_tokens 12"):
        run_extract(
            make_config(tree(corpus, tmp_path / "other", model, decoding={"max_value_tokens": 20}))
        )


def short(tmp_path, base, name, **sections):
    """The configuration of a training of 24 steps, which keeps a checkpoint every six."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 24)
    training = {**SHORT, "validation": str(corpus), **sections.pop("training", {})}
    return make_config(tree(corpus, tmp_path / name, base, training=training, **sections))


def cut_off(config, files):
    """Begins a training, which is interrupted once one of its files is a checkpoint that counts."""

    def interrupt(line):
        if any(name.endswith("checkpoint_manager_snapshot.json") for name in files()):
            _thread.interrupt_main()

    with pytest.raises(Interrupted, match="the same command goes on"):
        run_training(config, say=interrupt)


def step_of(line):
    return int(line.split("step ")[1].split(" ")[0])


@pytest.mark.slow
def test_cut_off_it_goes_on_to_the_same_weights(tmp_path, base):
    uncut, cut = short(tmp_path, base, "whole"), short(tmp_path, base, "cut")
    addresses = set()  # that anything of the training listens on
    ray.shutdown()  # other tests', which the training would join

    def look(_: str) -> None:
        ours = {child.pid for child in psutil.Process().children(recursive=True)}
        ports = psutil.net_connections("tcp")
        addresses.update(
            port.laddr.ip for port in ports if port.status == "LISTEN" and port.pid in ours
        )

    run_training(uncut, say=look)
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    folder = Path(cut.output.path)
    cut_off(cut, lambda: map(str, folder.rglob("checkpoints/**/*")))
    assert not (folder / "adapter").exists()
    lines = []
    assert (run_training(cut, say=lines.append).best.steps, step_of(lines[-1])) == (24, 24)
    files = [
        Path(config.output.path, "adapter", "adapter_model.safetensors") for config in (uncut, cut)
    ]
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=0)


@pytest.mark.parametrize("key", ["input.path", "training.validation"])
def test_a_file_that_is_not_there_is_named_before_anything_starts(tmp_path, base, key, monkeypatch):
    monkeypatch.setattr(
        "raypd.training.job.ray_session.connect", lambda *_: pytest.fail("Ray is started")
    )
    section, name = key.split(".")
    config = short(tmp_path, base, "out", **{section: {name: str(tmp_path / "nothere.jsonl")}})
    with pytest.raises(InputError, match=r"nothere.jsonl: no such file"):
        run_training(config, say=lambda _: None)
    assert not Path(config.output.path).exists()


@pytest.mark.slow
def test_the_lowest_validation_loss_wins(tmp_path, base):
    training = {"learning_rates": [10.0, 1e-2], "patience": 1, "schedule": "constant"}
    done = run_training(short(tmp_path, base, "out", training=training), say=lambda _: None)
    worse, better = done.attempts
    assert (done.best is better, worse.validation_loss > better.validation_loss) == (True, True)
    losses = [loss for *_, loss in better.curve if loss is not None]
    assert len(losses) == SHORT["evaluations"]  # each where it was measured, and nowhere else
    assert losses[-1] < losses[0]
    assert all(a[0] <= b[0] for a, b in pairwise(better.curve))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_workers_do_what_one_does(tmp_path, base, sharding):
    """Passes of four in two workers are passes of eight in one: loss, warm-up and evaluations are
    of the same steps.
    """
    training = {
        "weights": "full",
        "epochs": 2,
        "learning_rates": [1e-3],
        "max_grad_norm": 1e9,
        "warmup": 0.5,
    }
    single = short(tmp_path, base, "one", training={**training, "accumulate": 2, "batch_size": 4})
    double = short(
        tmp_path,
        base,
        "two",
        training={**training, "batch_size": 4, "sharding": sharding},
        cluster={"max_workers": 2, "min_workers": 2},
    )
    curves = [run_training(config, say=lambda _: None).best.curve for config in (single, double)]
    one, two = ([(step, loss) for step, _, loss in curve if loss is not None] for curve in curves)
    assert [step for step, _ in one] == [step for step, _ in two] == [2, 4, 6]
    assert [loss for _, loss in one] == pytest.approx([loss for _, loss in two], rel=1e-3)


@pytest.mark.slow
def test_checkpoints_and_weights_on_s3(tmp_path, base, bucket, s3_server):
    sections = {"output": {"path": f"{bucket}/trained"}, "storage": {"endpoint_url": s3_server.url}}
    config = short(tmp_path, base, "out", **sections)
    name = bucket.removeprefix("s3://")
    lines = []

    def keys():
        objects = (
            s3_server.client().list_objects_v2(Bucket=name, Prefix="trained/").get("Contents", [])
        )
        return {entry["Key"].removeprefix("trained/") for entry in objects}

    cut_off(config, keys)
    done = run_training(config, say=lines.append)
    assert {"training.json", "adapter/adapter_model.safetensors", "adapter/raypd.json"} <= keys()
    assert done.weights == f"{bucket}/trained/adapter"
    # Not from the beginning.
    assert step_of(next(line for line in lines if "step " in line)) > 6, lines
