"""Turn 300 labelled listings into a trained model, its scores and a configuration.

This takes ten minutes on two cores.

    python examples/fit.py
"""

from pathlib import Path

import raypd

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart" / "fit.yaml"

result = raypd.fit(CONFIG)
for score in result.scores:
    if score.f1 is not None and score.documents_per_second is not None:
        speed = score.documents_per_second.value
        print(f"{score.name}: F1 {score.f1.value:.3f}, {speed:.1f} documents/s")
print(f"recommended: {result.recommended}; run it with {result.configuration}")
