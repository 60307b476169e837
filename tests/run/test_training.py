"""What a training says at its end."""

import pytest

from raypd.run.training import TrainingAttempt, TrainingData, TrainingRecord


@pytest.mark.parametrize(("losses", "weights", "falls", "asks"), [
    ([2.0, 1.5, 1.6], "adapter", True, True), ([2.0, 2.1, 2.2], "model", False, True), ([2.0], "model", True, True),
    ([2.0, 2.2], "heads", False, False)])  # fmt: skip
def test_a_training_says_that_it_measured_no_answers_and_where_its_loss_never_fell(losses, weights, falls, asks):
    curve = [(10 * (n + 1), 3.0, loss) for n, loss in enumerate(losses)]
    attempt = TrainingAttempt(1e-4, min(losses), 10 * len(losses), 1000, curve)
    data = TrainingData(90, 10, 1000, 100, {}, "digest")
    said = TrainingRecord("hyper_parallel", data, [attempt], f"/out/{weights}", 1.0, 0.0).describe()
    assert ("never fell below that of step 10" in said) != falls
    assert ("answers were not scored" in said and "raypd evaluate RUN LABELS" in said and "raypd fit" in said) == asks
