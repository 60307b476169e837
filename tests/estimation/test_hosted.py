"""What a hosted batch would ask, beside an estimate."""

import json
import math
from collections.abc import Callable

import pytest

from raypd.billing import prices
from raypd.config import CostConfig, RunConfig
from raypd.config.load import make_config
from raypd.errors import ConfigError
from raypd.estimation import estimate as estimates, hosted, sampling
from raypd.estimation.estimate import estimate
from raypd.estimation.machines import EstimateOptions
from raypd.estimation.profile import DocumentCost, Profiler
from tests.estimation.test_estimate import stub_profiler
from tests.runs import TITLES, config_tree, extraction, says, write_rows
from tests.tiny import save_tiny

Measured = Callable[..., RunConfig]
OWN = "cost.hosted_prices={house: [2, 10], gpt-4.1: [1, 1]}"


@pytest.fixture
def measured(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """A configuration over four equal documents, which estimates measure in this process with a
    small random model.
    """
    model = save_tiny(tmp_path / "model")
    write_rows(
        tmp_path / "in.jsonl",
        (
            {
                "id": n,
                "title": "boots " * 5,
                "prompt": "Say it.",
            }
            for n in range(4)
        ),
    )
    stub_profiler(
        monkeypatch,
        lambda _, config, documents, *__: Profiler(1).profile(config, documents, math.inf),
    )

    def make(kind: str, method: str, *overrides: str) -> RunConfig:
        if kind == "extraction":
            task = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
        else:
            task = kind
        tree = config_tree(
            task,
            tmp_path / "in.jsonl",
            tmp_path / f"out-{method}",
            input=TITLES,
            model={"name": str(model), "dtype": "float32"},
            decoding={"method": method, "max_value_tokens": 5, "max_new_tokens": 40},
            engine={"max_num_seqs": 2},
        )
        return make_config(tree, list(overrides))

    return make


def tokens(config: RunConfig):
    return {
        name: of.value
        for name, of in estimate(config, EstimateOptions(sample=4)).hosted_tokens.items()
    }


def test_it_is_sent_the_prompt_and_writes_the_keys_too(measured: Measured) -> None:
    ours, theirs = (
        tokens(measured("extraction", method)) for method in ("hyper_parallel", "autoregressive")
    )
    # autoregressive decoding is given the answer's first two bytes, which are tokens of this
    # tokenizer
    assert ours["input"] == theirs["input"] - len("{\n")
    least = len('{\n"Brand": "",\n"Size": 1\n}')
    assert least <= ours["output"] <= least + 2 * 2 * 5 + 8


def test_the_price_is_tokens_times_list_price_and_all_is_said(
    measured: Measured, capsys, tmp_path
) -> None:
    config = measured("generation", "autoregressive", OWN, "cost.prices.local=1")
    estimates.run(config, EstimateOptions(sample=4, documents=1e6), False, False)
    tree = json.loads((tmp_path / "out-autoregressive/estimate.json").read_text())
    sent, written = (tree["hosted_tokens"][name]["value"] for name in ("input", "output"))
    assert sent == len("user\nSay it.") + 1 + len("\nassistant\n")  # <|im_end|> is one token
    assert 1 <= written <= 40
    found = {one["model"]: one for one in tree["hosted"]}
    assert set(found) == {"house", "gpt-4.1", "gpt-4.1-mini", "claude-haiku-5-5"}
    for name, (per_input, per_output) in {
        "house": (2, 10),
        "gpt-4.1": (1, 1),
        "gpt-4.1-mini": (0.2, 0.8),
    }.items():
        # Of 1,000, and of a million documents.
        usd = [found[name][key]["value"] for key in ("usd_per_1000", "usd")]
        assert usd == pytest.approx(
            [(sent * per_input + written * per_output) / 1e6 * n for n in (1000, 1e6)]
        )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "hosted batch" in line]
    says(
        line,
        "house $",
        "your own price",
        "gpt-4.1-mini $",
        "list price as of 2025-04-14",
        "Check list prices",
        f"{sent:.3g} tokens in",
        "by this model's tokenizer",
    )


def test_a_shared_prompt_is_asked_for_once_and_what_was_not_read_costs_nothing(
    measured: Measured, tmp_path
) -> None:
    config = measured(
        "generation", "autoregressive", "task.samples=2", "decoding.sampling.temperature=1"
    )
    rows = [
        {
            "sample": n,
            "tokens": 7,
            "counters": '{"prompt_tokens": 100}',
        }
        for n in (0, 1)
    ]
    assert hosted.count(config, DocumentCost(1.0, 150, 50, 300, rows=rows), len) == (100, 14)
    config = measured("extraction", "hyper_parallel")
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("no json\n" * 4)
    assert sampling.draw(config, 4).unreadable == 4
    half = tokens(config)["input"]
    (tmp_path / "in.jsonl").write_text(
        "".join((tmp_path / "in.jsonl").read_text().splitlines(True)[:4])
    )
    assert half == pytest.approx(tokens(config)["input"] / 2)


def test_list_prices_have_a_date_and_a_page_and_can_be_replaced() -> None:
    shipped = prices.hosted(CostConfig())
    assert len(shipped) >= 3
    for one in shipped:
        assert one.source[:8] == "https://"
        assert len(one.date) == len("2025-04-14")
        assert 0 < one.input < one.output
    assert prices.hosted(CostConfig(hosted_prices={"gpt-4.1": [3, 4]}))[0].input == 3
    with pytest.raises(
        ConfigError,
        match=r"cost\.hosted_prices=\.\.\. on the command line: a: \[1\.0, -1\.0\] are not two",
    ):
        make_config(config_tree("generation"), ["cost.hosted_prices={a: [1, -1]}"])
