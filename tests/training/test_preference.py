"""Preference rounds over runs whose answers a script writes.

Scores are compared with hand-made ones, losses with those of an unmodified model.
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
from raypd.training.data import check_training, prepare
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
# The texts of the main thread and its children.
SAMPLES = [
    (PARTS, "first part</async>", "second</async>"),
    (PLAIN,),
    ("no.",),
]
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
    """A folder with prompts (of two characters, as a Script expects) and runs.

    With `tags`, the tags of PASTA are tokens.
    """

    def __init__(self, tmp_path, prompts=("Q1", "Q2", "Q3", "Q4"), tags=False):
        self.folder = tmp_path
        self.tokenizer = tiny_tokenizer()
        self.words = ()
        if tags:
            add_control_tokens(tiny_model("llama"), self.tokenizer, "pasta")
            self.words = CONTROL_TOKENS["pasta"]
        rows = [{"id": prompt, "prompt": prompt} for prompt in prompts]
        self.path = write_rows(tmp_path / "prompts.jsonl", rows)

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
        """Return a configuration; `preference` has its keys, of a run the name of its folder."""
        training = {"weights": "full", "validation": str(self.path), **training}
        training["preference"] = None
        if preference is not None:
            keys = {
                "samples": "samples",
                "baseline": "baseline",
                "judged": "judged",
                **preference,
            }
            for name, key in keys.items():
                if isinstance(key, str):
                    keys[name] = str(self.folder / key)
            training["preference"] = keys
        decoding = {
            "method": method,
            "max_new_tokens": 300,
            "sampling": {"temperature": 1},
            **(decoding or {}),
        }
        task = {
            "kind": "generation",
            "chat_template": False,
            "samples": samples,
            **(task or {}),
        }
        return run_config(
            task,
            path or self.path,
            self.folder / "out",
            input={"text_columns": ["prompt"], "category_column": None},
            model={"name": "tiny", "device": "cpu", "dtype": dtype},
            training=training,
            decoding=decoding,
        )

    def decoded(self, name, method, scripts, **decoding):
        """Write a run in which the n-th script writes the n-th sample of every prompt."""
        config = self.config(method, len(scripts), decoding)
        documents = read_all(config)
        requests = build_task(config, self.tokenizer, 4096).plan(documents)
        records = []
        for request, script in zip(requests, itertools.cycle(scripts)):
            if method == "pasta":
                model = Script(*script, words=self.words).answer
            else:
                model = one_by_one(script[0])
            answer, _ = drive(request.program, model)
            records += request.finish(answer)
        return committed(self.folder / name, config, documents, records)

    def judge(self, verdict, name="judged", samples="samples"):
        """Write a run over the judge's prompts.

        verdict(prompt, sample, which of the two answers the sample is) returns what the judge says;
        None if it fails.
        """
        prompts = {document.row: document.id for document in read_all(self.config())}
        documents = []
        records = []
        for number, row in enumerate(self.comparisons(samples)):
            documents.append(
                Document(
                    number,
                    row["id"],
                    source="c.jsonl",
                    row=number,
                )
            )
            _, place, sample, _, order = json.loads(row["id"])
            text = verdict(prompts[place], sample, order)
            if text is None:
                records.append(Record(number, error="failed"))
                continue
            answer = {
                "sample": 0,
                "turn": 0,
                "text": text,
                "tokens": 1,
                "finish_reason": "stop",
            }
            records.append(Record(number, answer))
        return committed(self.folder / name, self.config("autoregressive", 1), documents, records)

    def comparisons(self, samples="samples"):
        return list(preference.comparisons(self.config(preference={"samples": samples}), Counter()))


def one_by_one(text):
    """Return a model of `autoregressive` that writes a text."""
    tokens = iter([*text.encode(errors="ignore"), EOS])
    return lambda feed: [next(tokens)]


@pytest.fixture
def corpus(tmp_path):
    """A corpus with SAMPLES, a baseline of 40 tokens, and a judge who prefers the first sample."""
    runs = Corpus(tmp_path)
    runs.decoded("samples", "pasta", SAMPLES)
    runs.decoded("baseline", "autoregressive", [("x" * 39,)])
    runs.judge(lambda _, sample, order: f"It is better.\n{win_lose_tie(sample, order)}")
    return runs


def win_lose_tie(sample, order):
    """A verdict by which the first sample wins, the second loses, and the third is a tie."""
    return (order, OTHER[order], "Tie")[sample]


def labelled(corpus, **keys):
    """Return the configuration, the documents with scored samples, and what was left out."""
    config = corpus.config(preference=keys)
    documents = read_all(config)
    return config, documents, preference.label(documents, config)


def pairs_of(corpus, **keys):
    """Return the pairs of a corpus, as (decoded best, decoded worst), and what made them."""
    config, documents, _ = labelled(corpus, **keys)
    make = PairExamples(config, corpus.tokenizer, 4096)
    texts = [written(example) for example in make(documents)]
    return list(zip(texts[::2], texts[1::2], strict=True)), make


def written(example):
    """Return all targets in the order of threads and positions, as text."""
    indices = sorted(example.targets, key=lambda i: (example.segments[i], example.positions[i]))
    tokens = [example.targets[index] for index in indices]
    return bytes(token for token in tokens if token > 2).decode()


def test_the_judge_sees_every_sample_on_both_sides(corpus):
    rows = corpus.comparisons()
    assert len(rows) == 4 * 3 * 2
    sample = "first partsecond, and so on"
    baseline = "x" * 39
    for row, order in zip(rows[:2], ("first", "second"), strict=True):
        _, _, number, _, row_order = json.loads(row["id"])
        assert number == 0
        assert row_order == order
        assert "<request>\nQ1\n</request>" in row["prompt"]
        assert f"<{order}>\n{sample}\n</{order}>" in row["prompt"]
        assert f"<{OTHER[order]}>\n{baseline}\n</{OTHER[order]}>" in row["prompt"]


def verdict_of_every_kind(prompt, sample, order):
    """What a judge says of some samples; a tie of the others."""
    if (prompt, sample) == ("Q1", 0):
        return f"Because.\n\n**{order.title()}**"  # it wins twice
    if (prompt, sample) == ("Q1", 1):
        return f"I say\n{OTHER[order]}\n"  # it loses twice
    if (prompt, sample) == ("Q1", 2):
        return "first"  # whichever is the first
    if (prompt, sample) == ("Q2", 0):
        return "first" if order == "first" else "tie"
    if (prompt, sample) == ("Q2", 1):
        return "The first or the second"  # unclear
    if (prompt, sample) == ("Q2", 2):
        return "second\nHard to say."  # unclear in its last line
    if (prompt, sample) == ("Q3", 1):
        return None
    return "tie"


def test_a_score_is_speedup_and_the_judge_s_verdicts(corpus):
    """The speedup is the baseline's 40 tokens by the longest path; lambda is 2."""
    corpus.judge(verdict_of_every_kind, "other")
    _, documents, skipped = labelled(corpus, quality_weight=2, judged="other")
    # The main thread waits at its <sync/> for the child of the second promise, or of the first.
    first = promise("a")
    second = promise("b", 10)
    child = max(
        len(first + "first part</async>"),
        len(first + second + "second</async>"),
        len(first + second + ", and<sync/>"),
    )
    fast = 40 / (child + len(" so on") + 1)
    slow = 40 / (len(PLAIN) + 1)
    short = 40 / 4
    scores = [[row["score"] for row in document.fields["target"]] for document in documents]
    assert scores[0] == pytest.approx([fast + 4, slow - 4, short])
    assert scores[1] == pytest.approx([fast + 2, slow, short])
    assert scores[2] == pytest.approx([fast, short])
    assert scores[3] == pytest.approx([fast, slow, short])
    assert dict(skipped) == {
        "verdicts that say none of first, second and tie: counted as a tie": 4,
        "samples that the judge did not answer in both orders": 1,
    }


def test_best_and_worst_make_a_pair(corpus):
    corpus.judge(lambda _, sample, order: win_lose_tie(sample, order), "other")
    pairs, _ = pairs_of(corpus, quality_weight=0, judged="other")
    assert pairs == [("no.", PLAIN)] * 4
    pairs, make = pairs_of(corpus, quality_weight=8, judged="other")
    # The texts of threads interleave, so that only their characters are compared.
    expected = sorted(PARTS + "first part</async>second</async>")
    assert len(pairs) == 4
    for best, worst in pairs:
        assert sorted(best) == expected
        assert worst == PLAIN
    assert not make.skipped


def test_prompts_whose_samples_score_alike_make_no_pair(corpus):
    def verdict(prompt, sample, order):
        return order if (prompt, sample) == ("Q2", 1) else "tie"

    corpus.decoded(
        "alike",
        "pasta",
        [
            ("one",),
            ("two",),
            ("six",),
        ],
    )
    corpus.judge(verdict, "other", "alike")
    ((best, worst),), make = pairs_of(
        corpus,
        samples="alike",
        judged="other",
    )
    assert best == "two"
    assert worst in ("one", "six")
    ((reason, count),) = make.skipped.items()
    assert "score alike" in reason
    assert count == 3
    assert make.lost == 0


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("script", CASES)
def test_a_sample_is_reproduced_as_it_was_fed(tmp_path, script, tags):
    """Tokens, positions, segments and targets are those of the run, the mask is the engine's."""
    corpus = Corpus(tmp_path, ["Q1"], tags)
    corpus.decoded("samples", "pasta", [script, ("no",)])
    corpus.decoded("baseline", "autoregressive", [("x" * 99,)])
    corpus.judge(lambda _, sample, order: order if sample == 0 else OTHER[order])
    config, (document,), _ = labelled(corpus, quality_weight=1000)
    example, worst = PairExamples(config, corpus.tokenizer, 4096)([document])
    assert example.shared == 2
    assert worst.shared == 2
    assert np.array_equal(example.tokens[:2], worst.tokens[:2])
    task = build_task(corpus.config(samples=1), corpus.tokenizer, 4096)
    model = Script(*script, words=corpus.words)
    targets = []

    def answer(feed):
        tokens = model.answer(feed)
        targets.extend(tokens)
        return tokens

    (request,) = task.plan([document])
    _, feeds = drive(request.program, answer)
    for name in ("tokens", "positions", "segments"):
        fed = [value for feed in feeds for value in getattr(feed, name)]
        assert getattr(example, name).tolist() == fed
    assert list(example.targets.values()) == targets
    (request,) = task.plan([document])
    assert recorded(request.program, example, 260) == allowed(example)


@pytest.mark.parametrize(
    "script",
    [
        (f"{promise('a')} x", "no end"),  # the interpreter closes the child
        ("\udcf0\udc9f\udc98 bytes of a character that is cut",),
        (f"{promise('a')} x", "nothing but \udcc3</async>"),
    ],
)
def test_a_sample_that_cannot_be_reproduced_is_left_out(tmp_path, script):
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
    assert list(make(documents)) == []
    assert make.lost == 4
    assert make.skipped["samples whose text does not come back token by token"] == 8
    assert make.skipped["prompts with less than two samples that come back"] == 4


def ignore(progress):
    pass


def trainer_of(corpus, tmp_path, model, rate=1e-3, training=None, **keys):
    """Return a trainer of a preference round with some keys, and its pairs."""
    training = {"evaluations": 1, **(training or {})}
    training["trainer"] = {"gradient_accumulation_steps": 4, **training.get("trainer", {})}
    config = corpus.config(preference=keys, **training)
    loaded = loaded_tiny(model)
    make_trainable(loaded, config)
    _, _, train, validation = prepare(config, loaded.tokenizer, 4096)
    trainer = make_trainer(loaded, config, train, validation, tmp_path / "trainer", rate, ignore)
    return trainer, train


def direct(model, example):
    """Return log p of an answer by an unmodified model with a dense mask."""
    logprobs = dense_logits(model, example).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(list(example.targets.values()))[:, None]).sum()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_loss_is_bonbons(corpus, tmp_path, is_reversed):
    """Value and gradients in float64, of a pair whose best or whose worst answer has threads."""
    model, reference, initial = (in_float64(tiny_model("llama", seed)) for seed in (0, 0, 3))
    keys = {"quality_weight": 8, "alpha": 0.3, "beta": 0.2}
    trainer, train = trainer_of(corpus, tmp_path, model, **keys)
    pair = train[0]
    assert [len(set(example.segments)) for example in pair] == [6, 1]
    if is_reversed:
        pair = pair[::-1]
    for example in pair:
        with torch.no_grad():
            example.initial = float(direct(initial, example).float())
    best, worst = (direct(reference, example) for example in pair)
    initial_ratio = pair[0].initial - pair[1].initial
    expected = -0.3 * best + 0.7 * (best - worst - initial_ratio - 5) ** 2
    expected.backward()
    with _Wide():
        loss = trainer.compute_loss(trainer.model, pack(pair))
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradients(trainer.model),
        gradients(reference),
        rtol=1e-5,
        atol=1e-4,
    )


def log_ratio(model, pair):
    """Return log p(best) / p(worst) by an unmodified model."""
    best, worst = (direct(model.double(), example) for example in pair)
    return float(best - worst)


def test_a_round_moves_the_model_from_worst_to_best(corpus, tmp_path):
    """It moves by 1/beta from the log-ratio of the model before, which the examples hold."""
    before = tiny_model("llama")
    model = tiny_model("llama")
    training = {"epochs": 40, "trainer": {"lr_scheduler_type": "linear"}}
    trainer, train = trainer_of(
        corpus, tmp_path, model, 2e-4, training, quality_weight=8, beta=0.1, alpha=0.0
    )
    for example in itertools.chain(*train):
        assert example.initial == pytest.approx(direct(before.double(), example).item(), rel=1e-4)
    trainer.train()
    # The loss that is logged first is the mean over the four pairs of a step.
    assert trainer.state.log_history[0]["loss"] == pytest.approx(10**2, rel=1e-3)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        moved = [log_ratio(model, pair) - log_ratio(before, pair) for pair in train]
    assert moved == pytest.approx([10] * 4, abs=4)


def test_the_model_before_computes_as_a_step_does(corpus, tmp_path):
    """In bfloat16, the log-ratio has not moved before anything is learned, whatever is rounded."""
    training = {"epochs": 1, "dtype": "bfloat16"}
    trainer, _ = trainer_of(
        corpus, tmp_path, tiny_model("llama"), 1e-9, training, beta=0.1, alpha=0.0
    )
    assert trainer.args.bf16
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(10**2, rel=1e-6)


def test_a_round_resumes_to_the_same_weights(corpus, tmp_path):
    """Even if the model is loaded anew, answers are compared with the model before the round."""
    trainer = {"lr_scheduler_type": "constant"}
    training = {"epochs": 4, "evaluations": 4, "trainer": trainer}
    whole, _ = trainer_of(corpus, tmp_path / "whole", tiny_model("llama"), training=training)
    whole.train()
    checkpoint = tmp_path / "whole" / "trainer" / "checkpoint-3"
    resumed, _ = trainer_of(corpus, tmp_path / "resumed", tiny_model("llama"), training=training)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for pair, other_pair in zip(whole.train_dataset, resumed.train_dataset, strict=True):
        initial = [example.initial for example in pair]
        assert initial == [example.initial for example in other_pair]
    weights = resumed.model.state_dict()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, weights[name])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"preference": {"samples": "none"}},
            "training.preference.samples: .*none: no run here .*: give the output.path of a run",
        ),
        (
            {"preference": {"samples": "baseline"}},
            "samples: .*give one with decoding.method pasta",
        ),
        (
            {"preference": {"baseline": "samples"}},
            "baseline: .*decoding.method autoregressive",
        ),
        (
            {"preference": {}, "decoding": {"options": {"max_async_tokens": 9}}},
            "samples: .*max_async_tokens 256, and here it is 9",
        ),
        (
            {"preference": {}, "task": {"system": "Be brief"}},
            "samples: .*task.system None, and here it is 'Be brief'",
        ),
        (
            {"preference": {"samples": None}},
            "judged .*: is a judge's run; give keys of its model",
        ),
        (
            {"preference": {}, "labels": "x"},
            "training.labels and training.preference are both set",
        ),
        (
            {"preference": {}, "method": "apar"},
            "training.preference is for decoding.method pasta",
        ),
    ],
)
def test_unusable_keys_are_refused(corpus, keys, message):
    with pytest.raises(ConfigError, match=message):
        check_training(corpus.config(**keys))


def test_a_round_begins_without_an_adapter(corpus):
    config = corpus.config(preference={})
    check_training(config)
    message = r"model.adapter: a preference round begins from model.name alone"
    with pytest.raises(ConfigError, match=message):
        check_training(with_keys(config, model={"adapter": "a"}))


def prepare_round(corpus, preference, **keys):
    prepare(corpus.config(preference=preference, **keys), tiny_tokenizer(), 4096)


def test_samples_of_other_prompts_are_refused(corpus, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Corpus(tmp_path / "elsewhere", ["A longer prompt"])
    path = elsewhere.path.rename(elsewhere.folder / "others.jsonl")
    message = "no prompt of input.path has a sample of .*give runs over the same input"
    with pytest.raises(InputError, match=message):
        prepare_round(corpus, {}, path=path, validation=str(path))


def test_a_run_that_is_no_judge_s_is_refused(corpus):
    message = "'Q1' is not a comparison; give the judge's run over a round's"
    with pytest.raises(ConfigError, match=message):
        prepare_round(corpus, {"judged": "baseline"})


@pytest.fixture
def alike(corpus):
    """A corpus with other samples, whose speedups are equal."""
    corpus.decoded(
        "alike",
        "pasta",
        [
            ("one",),
            ("two",),
            ("six",),
        ],
    )
    return corpus


def test_verdicts_on_other_samples_do_not_count(alike):
    with pytest.raises(InputError, match="12 x samples that the judge did not answer"):
        prepare_round(alike, {"samples": "alike"})


def test_a_round_without_a_difference_is_refused(alike):
    alike.judge(lambda *_: "tie", "all alike", "alike")
    message = "no document that can be used\n  8 x prompts whose samples all score alike"
    with pytest.raises(InputError, match=message):
        prepare_round(alike, {"samples": "alike", "judged": "all alike"})


@pytest.fixture
def yaml(tmp_path):
    runs = {"samples": "runs/s", "baseline": "s3://b/runs", "judged": "/x/judged"}
    tree = config_tree("generation", training={"preference": runs})
    (tmp_path / "a.yaml").write_text(json.dumps(tree))
    return tmp_path / "a.yaml"


def test_paths_of_runs_are_relative_to_the_yaml(yaml):
    keys = load_config(yaml).training.preference
    assert keys.samples == str(yaml.parent / "runs/s")
    assert keys.baseline == "s3://b/runs"
    assert keys.judged == "/x/judged"


def test_beta_is_above_zero(yaml):
    with pytest.raises(ConfigError, match=r"training.preference.beta"):
        load_config(yaml, ["training.preference.beta=0"])


SERVER = {"model.name": "J", "model.endpoint": {"url": "http://127.0.0.1:9/v1"}}
ALL_RUNS = {
    "samples": None,
    "baseline": {"model.name": "B"},
    "judged": SERVER,
    "rounds": 2,
}


@pytest.fixture
def steps(corpus, monkeypatch):
    """The checks, runs and trainings that `train` starts, in words; none of them decodes."""
    steps = []

    def run(config, verbose):
        path = Path(config.output.path)
        folder = path.relative_to(corpus.folder)
        model = " ".join(filter(None, [config.model.name, config.model.revision]))
        steps.append(f"{folder} by {model} x {config.task.samples}")
        if path.name == "samples":
            corpus.decoded(path, config.decoding.method, SAMPLES)
        elif path.name == "baseline":
            corpus.decoded(path, config.decoding.method, [("x" * 39,)])
        else:
            documents = read_all(config)
            row = {
                "sample": 0,
                "turn": 0,
                "text": "first",
                "tokens": 1,
                "finish_reason": "stop",
            }
            records = [Record(document.index, dict(row)) for document in documents]
            committed(path, config, documents, records)

    def train(config, verbose):
        data, _, _, _ = prepare(config, corpus.tokenizer, 4096)
        name = Path(config.output.path).name
        steps.append(f"{name}, {data.documents} prompts")
        return SimpleNamespace(weights=f"weights of {name}")

    def check(model, machine, purpose):
        assert purpose == "decode"
        steps.append(f"check {model.name}")

    monkeypatch.setattr(prerequisites, "check_model_config", check)
    # There is no model "tiny".
    monkeypatch.setattr(prerequisites, "check_weights", lambda config: None)
    monkeypatch.setattr(prerequisites, "run_extract", run)
    monkeypatch.setattr(prerequisites, "run_training", train)
    return steps


def test_one_command_executes_all_runs_of_all_rounds(corpus, steps):
    prerequisites.train(corpus.config(preference=ALL_RUNS))
    assert steps == [
        "check B",  # J is a server
        "out/round-1/baseline by B x 1",
        "out/round-1/samples by tiny x 10",
        "out/round-1/judged by J x 1",
        "round-1, 4 prompts",
        "out/samples by weights of round-1 x 10",
        "out/judged by J x 1",
        "out, 4 prompts",
    ]


def test_unknown_keys_of_a_run_are_refused_before_the_first_run(corpus, steps):
    keys = {**ALL_RUNS, "judged": {"model.nam": "J"}}
    with pytest.raises(ConfigError, match=r"judged: .*model\.nam"):
        prerequisites.train(corpus.config(preference=keys))
    assert steps == ["check B"]


def test_keys_of_one_run_do_not_reach_another(corpus, steps):
    baseline = {"model.name": "B", "model.revision": "of-b"}
    prerequisites.train(corpus.config(preference={**ALL_RUNS, "baseline": baseline}))
    assert "out/round-1/baseline by B of-b x 1" in steps
    assert "out/round-1/judged by J x 1" in steps
