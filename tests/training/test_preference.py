"""Preference rounds: runs whose answers a script writes, against scores by hand and an unmodified
model's loss.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raypd.config.load import load_config
from raypd.errors import ConfigError, InputError
from raypd.models.control_tokens import CONTROL_TOKENS, add_control_tokens
from raypd.tasks import build_task
from raypd.tasks.base import Document, Record
from raypd.training import preference, prerequisites
from raypd.training.data import check, prepare
from raypd.training.packing import pack
from raypd.training.preference import PairExamples
from raypd.training.trainer import make_trainer
from raypd.training.weights import make_trainable
from tests.decoding.drivers import drive
from tests.decoding.pasta_script import EOS, Script, promise
from tests.runs import committed, config_tree, read_all, run_config, with_keys, write_rows
from tests.tiny import _Wide, in_float64, tiny_model, tiny_tokenizer
from tests.training.data import allowed, dense_logits, loaded_tiny, recorded

PARTS = f"{promise('a')}{promise('b', 10)}, and<sync/> so on"
PLAIN = "all of it, one token after the other, which takes its time and then some more of it."
# Of the main thread and its children.
SAMPLES = [(PARTS, "first part</async>", "second</async>"), (PLAIN,), ("no.",)]
OTHER = {"first": "second", "second": "first"}
THREE = f"x{promise('a', 30)}{promise('b')}<sync/>y{promise('c')}<sync/>z"
CASES = [
    SAMPLES[0],
    ("a <b>bold</b> < text, no promise <sync/> here",),
    (THREE, "1</async>", "2 <sync/> 2</async>", "3</async>"),
    (f"{promise('é', 999)} ü <promise topic='q'> w", "ä</async>", "of no number</async>"),
    (f"<async>stray</async>{promise('a')}", "</async>"),
]


class Corpus:
    """A folder with prompts (of two characters, as a Script has them), and runs. tags: those of
    PASTA are tokens.
    """

    def __init__(self, tmp_path, prompts=("Q1", "Q2", "Q3", "Q4"), tags=False):
        self.folder, self.tokenizer, self.words = tmp_path, tiny_tokenizer(), ()
        if tags:
            add_control_tokens(tiny_model("llama"), self.tokenizer, "pasta")
            self.words = CONTROL_TOKENS["pasta"]
        self.path = write_rows(
            tmp_path / "prompts.jsonl", ({"id": prompt, "prompt": prompt} for prompt in prompts)
        )

    def config(
        self,
        method="pasta",
        samples=3,
        decoding=None,
        preference=None,
        path=None,
        task=None,
        dtype="float32",
        **training,
    ):
        """preference: its keys; of a run the name of its folder."""
        keys = {
            "samples": "samples",
            "baseline": "baseline",
            "judged": "judged",
            **(preference or {}),
        }
        chosen = {
            name: str(self.folder / key) if isinstance(key, str) else key
            for name, key in keys.items()
        }
        sections = {
            "input": {"text_columns": ["prompt"], "category_column": None},
            "model": {"name": "tiny", "device": "cpu", "dtype": dtype},
            "training": {"weights": "full", "validation": str(self.path), **training},
            "decoding": {
                "method": method,
                "max_new_tokens": 300,
                "sampling": {"temperature": 1},
                **(decoding or {}),
            },
        }
        sections["training"]["preference"] = None if preference is None else chosen
        task = {"kind": "generation", "chat_template": False, "samples": samples, **(task or {})}
        return run_config(task, path or self.path, self.folder / "out", **sections)

    def decoded(self, name, method, scripts, **decoding):
        """A run in which the n-th sample of every prompt is what the n-th script writes."""
        config, records = self.config(method, len(scripts), decoding), []
        documents = read_all(config)
        requests = build_task(config, self.tokenizer, 4096).plan(documents)
        for request, script in zip(requests, itertools.cycle(scripts)):
            tokens = iter([*script[0].encode(errors="ignore"), EOS])
            model = Script(*script, words=self.words).answer
            answer, _ = drive(
                request.program,
                model if method == "pasta" else lambda _, tokens=tokens: [next(tokens)],
            )
            records += request.finish(answer)
        return committed(self.folder / name, config, documents, records)

    def judge(self, verdict, name="judged", samples="samples"):
        """A run over the judge's file; verdict(prompt, sample, where it stands) is what the judge
        says.
        """
        rows = self.comparisons(samples)
        documents = [
            Document(n, row["id"], source="c.jsonl", place=n) for n, row in enumerate(rows)
        ]
        prompts, records = {document.place: document.id for document in read_all(self.config())}, []
        for n, row in enumerate(rows):
            _, place, sample, _, order = json.loads(row["id"])
            answer = {
                "sample": 0,
                "turn": 0,
                "text": verdict(prompts[place], sample, order),
                "tokens": 1,
            }
            failed = answer["text"] is None
            records.append(
                Record(n, error="failed")
                if failed
                else Record(n, answer | {"finish_reason": "stop"})
            )
        return committed(self.folder / name, self.config("autoregressive", 1), documents, records)

    def comparisons(self, samples="samples"):
        return list(preference.comparisons(self.config(preference={"samples": samples}), Counter()))


@pytest.fixture
def corpus(tmp_path):
    """Samples that are whole, fast and slow, a baseline of 40 tokens, and a judge of parts."""
    runs = Corpus(tmp_path)
    runs.decoded("samples", "pasta", SAMPLES)
    runs.decoded("baseline", "autoregressive", [("x" * 39,)])
    runs.judge(lambda _, sample, order: f"It is better.\n{(order, OTHER[order], 'Tie')[sample]}")
    return runs


def labelled(corpus, **keys):
    """The configuration, the documents with their scored samples, and what was left out."""
    config = corpus.config(preference=keys)
    documents = read_all(config)
    return config, documents, preference.label(documents, config)


def pairs_of(corpus, **keys):
    """The pairs of the corpus, as (decoded best, decoded worst), and what made them."""
    config, documents, _ = labelled(corpus, **keys)
    make = PairExamples(config, corpus.tokenizer, 4096)
    texts = [written(example) for example in make(documents)]
    return list(zip(texts[::2], texts[1::2], strict=True)), make


def written(example):
    """All targets in the order of threads and positions."""
    places = sorted(example.targets, key=lambda i: (example.segments[i], example.positions[i]))
    return bytes(example.targets[i] for i in places if example.targets[i] > 2).decode()


def test_the_judge_sees_every_sample_on_both_sides(corpus):
    rows, joined = corpus.comparisons(), "first partsecond, and so on"
    assert len(rows) == 4 * 3 * 2
    for row, order in zip(rows[:2], ("first", "second"), strict=True):
        assert json.loads(row["id"])[2::2] == [0, order]
        assert "<request>\nQ1\n</request>" in row["prompt"]
        for name, text in ((order, joined), (OTHER[order], "x" * 39)):
            assert f"<{name}>\n{text}\n</{name}>" in row["prompt"]


def test_a_score_is_speedup_and_what_the_judge_says(corpus):
    """Speedup by hand: 40 tokens of the baseline over the longest path; the sum of both orders,
    times lambda.
    """
    verdicts = {
        ("Q1", 0): lambda order: f"Because.\n\n**{order.title()}**",  # wins twice
        ("Q1", 1): lambda order: f"I say\n{OTHER[order]}\n",  # loses twice
        ("Q1", 2): lambda order: "first",  # whatever stands there
        ("Q2", 0): lambda order: f"{order}" if order == "first" else "tie",
        ("Q2", 1): lambda order: "The first or the second",
        ("Q2", 2): lambda order: "second\nHard to say.",
        ("Q3", 1): lambda order: None,
    }
    corpus.judge(
        lambda prompt, sample, order: verdicts.get((prompt, sample), lambda _: "tie")(order),
        "other",
    )
    _, documents, skipped = labelled(corpus, quality_weight=2, judged="other")
    # the main thread waits at its <sync/> for the child of the second promise, or that of the first
    first, second = promise("a"), promise("b", 10)
    child = max(
        len(first + "first part</async>"),
        len(first + second + "second</async>"),
        len(first + second + ", and<sync/>"),
    )
    fast, slow, short = 40 / (child + len(" so on") + 1), 40 / (len(PLAIN) + 1), 40 / 4
    want = [
        [fast + 4, slow - 4, short],
        [fast + 2, slow, short],
        [fast, short],
        [fast, slow, short],
    ]
    assert [[row["score"] for row in d.fields["target"]] for d in documents] == list(
        map(pytest.approx, want)
    )
    words = "verdicts that say none of first, second and tie: taken as a tie"
    assert dict(skipped) == {words: 4, "samples that the judge did not answer in both orders": 1}


def test_best_and_worst_make_a_pair(corpus):
    corpus.judge(lambda _, sample, order: (order, OTHER[order], "tie")[sample], "other")
    assert pairs_of(corpus, quality_weight=0, judged="other")[0] == [("no.", PLAIN)] * 4
    pairs, make = pairs_of(corpus, quality_weight=8, judged="other")
    best = sorted(PARTS + "first part</async>second</async>")
    assert [(sorted(found), worst) for found, worst in pairs] == [(best, PLAIN)] * 4
    assert not make.skipped


def test_prompts_whose_samples_score_alike_make_none(corpus):
    corpus.decoded("alike", "pasta", [("one",), ("two",), ("six",)])
    corpus.judge(
        lambda prompt, sample, order: order if (prompt, sample) == ("Q2", 1) else "tie",
        "other",
        "alike",
    )
    pairs, make = pairs_of(corpus, samples="alike", judged="other")
    assert pairs in ([("two", "one")], [("two", "six")])
    ((reason, count),) = make.skipped.items()
    assert (count, make.lost, "score alike" in reason) == (3, 0, True)


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("script", CASES)
def test_a_sample_comes_back_as_it_was_fed(tmp_path, script, tags):
    """Tokens, positions, segments and targets are those of the decoding that wrote the run; the
    mask is its own.
    """
    corpus = Corpus(tmp_path, ["Q1"], tags)
    corpus.decoded("samples", "pasta", [script, ("no",)])
    corpus.decoded("baseline", "autoregressive", [("x" * 99,)])
    corpus.judge(lambda _, sample, order: order if sample == 0 else OTHER[order])
    config, (document,), _ = labelled(corpus, quality_weight=1000)
    example, worst = PairExamples(config, corpus.tokenizer, 4096)([document])
    task, answers = build_task(corpus.config(samples=1), corpus.tokenizer, 4096), []
    model = Script(*script, words=corpus.words)
    (request,), (again,) = task.plan([document]), task.plan([document])
    _, feeds = drive(
        request.program, lambda feed: answers.append(model.answer(feed)) or answers[-1]
    )
    for name in ("tokens", "positions", "segments"):
        assert getattr(example, name).tolist() == [
            value for feed in feeds for value in getattr(feed, name)
        ]
    assert list(example.targets.values()) == list(itertools.chain(*answers))
    assert example.shared == worst.shared == 2
    assert np.array_equal(example.tokens[:2], worst.tokens[:2])
    assert recorded(again.program, example, 260) == allowed(example)


@pytest.mark.parametrize(
    "script",
    [
        (f"{promise('a')} x", "no end"),  # the interpreter closes the child
        ("\udcf0\udc9f\udc98 bytes of a character that is cut",),
        (f"{promise('a')} x", "nothing but \udcc3</async>"),
    ],
)
def test_what_does_not_come_back_is_left_out(tmp_path, script):
    corpus = Corpus(tmp_path, tags=True)
    corpus.decoded("baseline", "autoregressive", [("x" * 39,)])
    corpus.decoded("samples", "pasta", [script, *SAMPLES[1:]])
    corpus.judge(lambda _, sample, order: order if sample == 0 else "tie")
    pairs, make = pairs_of(corpus, quality_weight=8)
    assert pairs == [("no.", PLAIN)] * 4
    assert dict(make.skipped) == {"samples whose text does not come back token by token": 4}


def test_tokens_that_are_not_those_of_the_text_are_left_out(corpus):
    config, documents, _ = labelled(corpus)
    for document in documents:
        for row in document.fields["target"][:2]:
            row["tokens"] += 1
    make = PairExamples(config, tiny_tokenizer(), 4096)
    assert (list(make(documents)), make.lost) == ([], 4)
    assert make.skipped["samples whose text does not come back token by token"] == 8
    assert make.skipped["prompts with less than two samples that come back"] == 4


def trainer_of(corpus, tmp_path, model, rate=1e-3, **keys):
    training = {"evaluations": 1, "accumulate": 4, **keys.pop("training", {})}
    config, loaded = corpus.config(preference=keys, **training), loaded_tiny(model)
    make_trainable(loaded, config)
    _, train, validation = prepare(config, loaded.tokenizer, 4096)
    return make_trainer(
        loaded, config, train, validation, tmp_path / "trainer", rate, lambda _: None
    ), train


def direct(model, example):
    """log p of an answer by an unmodified model with a dense mask."""
    logprobs = dense_logits(model, example).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(list(example.targets.values()))[:, None]).sum()


def test_the_loss_is_bonbons(corpus, tmp_path):
    """Value and gradients in float64, of a pair whose worst answer has threads, or whose best
    has.
    """
    keys = {"quality_weight": 8, "alpha": 0.3, "beta": 0.2}
    model, reference, initial = (in_float64(tiny_model("llama", seed)) for seed in (0, 0, 3))
    trainer, train = trainer_of(corpus, tmp_path, model, **keys)
    assert [len(set(example.segments)) for example in train[0]] == [6, 1]  # the best has threads
    for pair in (train[0], train[0][::-1]):
        for example in pair:
            with torch.no_grad():
                example.initial = float(direct(initial, example).float())
        for one in (reference, trainer.model):
            one.zero_grad()
        best, worst = (direct(reference, example) for example in pair)
        want = -0.3 * best + 0.7 * (best - worst - (pair[0].initial - pair[1].initial) - 5) ** 2
        want.backward()
        with _Wide():
            loss = trainer.compute_loss(trainer.model, pack(pair))
            loss.backward()
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
        ours, theirs = (
            {name: p.grad for name, p in m.named_parameters()} for m in (trainer.model, reference)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_a_round_moves_the_model_from_worst_to_best(corpus, tmp_path):
    """By 1/beta, from the log-ratio of the model before, which is kept with the examples."""
    before, model = tiny_model("llama"), tiny_model("llama")
    training = {"epochs": 40, "schedule": "linear"}
    trainer, train = trainer_of(
        corpus, tmp_path, model, 2e-4, quality_weight=8, beta=0.1, training=training, alpha=0.0
    )
    for example in itertools.chain(*train):
        assert example.initial == pytest.approx(direct(before.double(), example).item(), rel=1e-4)
    trainer.train()
    # The mean over a step's four pairs.
    assert trainer.state.log_history[0]["loss"] == pytest.approx(10**2, rel=1e-3)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logs = [
            [[direct(of.double(), one) for one in pair] for of in (model, before)] for pair in train
        ]
    assert [float(best - worst - was[0] + was[1]) for (best, worst), was in logs] == pytest.approx(
        [10] * 4, abs=4
    )


def test_the_model_before_computes_as_a_step_does(corpus, tmp_path):
    """In bfloat16: before anything is learned the log-ratio has not moved, whatever is lost to
    rounding.
    """
    training = {"epochs": 1, "dtype": "bfloat16"}
    trainer, _ = trainer_of(
        corpus, tmp_path, tiny_model("llama"), 1e-9, beta=0.1, alpha=0.0, training=training
    )
    assert trainer.args.bf16
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(10**2, rel=1e-6)


def test_a_round_goes_on_to_the_same_weights(corpus, tmp_path):
    """From a checkpoint, of a model that is loaded anew: the model before the round is still the
    one compared with.
    """
    states, training = [], {"epochs": 4, "evaluations": 4, "schedule": "constant"}
    for name in ("whole", "on"):
        trainer, _ = trainer_of(corpus, tmp_path / name, tiny_model("llama"), training=training)
        checkpoint = tmp_path / "whole" / "trainer" / "checkpoint-3"
        trainer.train(resume_from_checkpoint=str(checkpoint) if name == "on" else None)
        states.append(
            (
                trainer.model.state_dict(),
                [e.initial for pair in trainer.train_dataset for e in pair],
            )
        )
    (uncut, initial), (on, same) = states
    assert initial == same
    assert all(torch.equal(uncut[name], on[name]) for name in uncut)


def test_bad_input_is_one_message(corpus, tmp_path):
    none = "training.preference.samples: .*none: no run here .* give the output.path of a run"
    for keys, words in (
        ({"preference": {"samples": "none"}}, none),
        ({"preference": {"samples": "baseline"}}, "samples: .*give one with decoding.method pasta"),
        ({"preference": {"baseline": "samples"}}, "baseline: .*decoding.method autoregressive"),
        (
            {"preference": {}, "decoding": {"max_async_tokens": 9}},
            "samples: .*max_async_tokens 256, and here it is 9",
        ),
        (
            {"preference": {}, "task": {"system": "Be brief"}},
            "samples: .*task.system None, and here it is 'Be brief'",
        ),
        ({"preference": {"samples": None}}, "judged .*: is a judge's run; give keys of its model"),
        ({"preference": {}, "labels": "x"}, "training.labels and training.preference are both set"),
        ({"preference": {}, "method": "apar"}, "training.preference is for decoding.method pasta"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(corpus.config(**keys))
    config = corpus.config(preference={})
    check(config)
    with pytest.raises(
        ConfigError, match=r"model.adapter: a preference round begins from model.name alone"
    ):
        check(with_keys(config, model={"adapter": "a"}))
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Corpus(tmp_path / "elsewhere", ["A longer prompt"])
    elsewhere.path = elsewhere.path.rename(elsewhere.folder / "others.jsonl")
    others = {"path": elsewhere.path, "validation": str(elsewhere.path)}
    corpus.decoded("alike", "pasta", [("one",), ("two",), ("six",)])
    corpus.judge(lambda *_: "tie", "all alike", "alike")
    alike = "no document that can be used\n  8 x prompts whose samples all score alike"
    for runs, keys, error, words in (
        (
            {},
            others,
            InputError,
            "no prompt of input.path has a sample of .*give runs over the same input",
        ),
        (
            {"judged": "baseline"},
            {},
            ConfigError,
            "'Q1' is no comparison; give the judge's run over a round's",
        ),
        # But those of others.
        ({"samples": "alike"}, {}, InputError, "12 x samples that the judge did not answer"),
        ({"samples": "alike", "judged": "all alike"}, {}, InputError, alike),
    ):
        with pytest.raises(error, match=words):
            prepare(corpus.config(preference=runs, **keys), tiny_tokenizer(), 4096)


def test_runs_are_found_from_the_yaml(tmp_path):
    runs = {"samples": "runs/s", "baseline": "s3://b/runs", "judged": "/x/judged"}
    (tmp_path / "a.yaml").write_text(
        json.dumps(config_tree("generation", training={"preference": runs}))
    )
    preferences = load_config(tmp_path / "a.yaml").training.preference.model_dump()
    assert {name: preferences[name] for name in runs} == runs | {
        "samples": str(tmp_path / "runs/s")
    }
    with pytest.raises(ConfigError, match=r"training.preference.beta"):
        load_config(tmp_path / "a.yaml", ["training.preference.beta=0"])


def test_all_rounds_by_one_command(corpus, monkeypatch):
    server = {"model.name": "J", "model.endpoint": {"url": "http://127.0.0.1:9/v1"}}
    made, keys = (
        [],
        {"samples": None, "baseline": {"model.name": "B"}, "judged": server, "rounds": 2},
    )

    def run(config, verbose):
        path, documents = Path(config.output.path), read_all(config)
        made.append(
            f"{path.relative_to(corpus.folder)} by {config.model.name} x {config.task.samples}"
        )
        words = {"sample": 0, "turn": 0, "text": "first", "tokens": 1, "finish_reason": "stop"}
        if path.name == "judged":
            committed(
                path,
                config,
                documents,
                [Record(document.index, dict(words)) for document in documents],
            )
        else:
            corpus.decoded(
                path, config.decoding.method, SAMPLES if path.name == "samples" else [("x" * 39,)]
            )

    def training(config, verbose):
        made.append(
            f"{Path(config.output.path).name}, "
            f"{prepare(config, corpus.tokenizer, 4096)[0].documents} prompts"
        )
        return SimpleNamespace(weights=f"weights of {made[-1]}")

    monkeypatch.setattr(
        prerequisites,
        "check_model_config",
        lambda model, machine: made.append(f"check {model.name}"),
    )
    monkeypatch.setattr(prerequisites, "run_extract", run)
    monkeypatch.setattr(prerequisites, "run_training", training)
    prerequisites.train(corpus.config(preference=keys))
    first, second = (
        ("out/round-1/", "tiny", "round-1"),
        ("out/", "weights of round-1, 4 prompts", "out"),
    )
    rounds = (
        [f"{at}samples by {m} x 10", f"{at}judged by J x 1", f"{n}, 4 prompts"]
        for at, m, n in (first, second)
    )
    # J is a server.
    assert made == ["check B", "out/round-1/baseline by B x 1", *itertools.chain(*rounds)]
    with pytest.raises(ConfigError, match=r"judged: .*model\.nam"):
        prerequisites.train(corpus.config(preference=keys | {"judged": {"model.nam": "J"}}))
