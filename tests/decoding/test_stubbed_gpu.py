"""tests/test_gpu.py where there is no GPU: that it runs, and holds for torch's own attention."""

import pytest

from tests.processes import ended, start


@pytest.mark.slow
def test_the_tests_for_a_gpu_pass_on_a_cpu() -> None:
    options = "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "tests.decoding.stubbed_gpu"
    chosen = "not triton and not graphs and not random_pass and not real_model"
    said = ended(start("-m", "pytest", *options, "tests/test_gpu.py", "-k", chosen))
    assert " passed" in said
    assert [word for word in ("failed", "error") if word in said] == []
