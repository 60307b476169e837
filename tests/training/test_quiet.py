"""What other packages print while training is imported."""

import subprocess
import sys


def test_importing_the_training_prints_nothing_of_other_packages() -> None:
    words = [sys.executable, "-c", "import raypd.training.weights"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
