"""The summary of `make gpu`."""

from pathlib import Path

import pytest

from benchmarks import gpu

CASES = """<testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>
<testcase name="c"><skipped/></testcase></testsuite>"""


@pytest.mark.parametrize(("text", "words"), [
    (f"<testsuites>{CASES}</testsuites>", "1 tests held, 1 failed ['b'], 1 were skipped"),
    ("<testsuites>", "did not end in their time"), (None, "did not end in their time")])  # fmt: skip
def test_it_says_which_estimates_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text, words: str) -> None:
    monkeypatch.setattr(gpu, "predicted", lambda name: 30.0)
    lines = [["Qwen3-8B", "hyper_parallel", "triton", 256, "9", "28.0"],
             ["Qwen3-8B", "generate", "sdpa", 64, "32", "2.0"],
             ["Qwen3-8B", "vllm", "its own", "failed: ..."]]  # fmt: skip
    shares = {("Qwen3-8B", "triton"): {"prefill": 0.5, "decode": 0.6}, ("tiny", "sdpa"): {"prefill": 0.1}}
    if text is not None:
        (tmp_path / "t.xml").write_text(text)
    _, *said, exact = gpu.summary(lines, shares, str(tmp_path / "t.xml"))
    assert [line.split()[0] for line in said] == ["MISSED", "held", "held", "not", "held"]
    assert (said[0][-18:], said[2][-17:]) == ("0.82, measured 0.5", "13.8, measured 14")
    assert words in exact
