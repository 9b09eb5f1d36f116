"""The judge: the trunk of the large tier as it is, without lessons in judging.

Its score of an answer is the probability of the least likely token of it, the end included: a model that can solve a
problem expects the right answer, and who cannot solve it cannot judge it. What lessons brought: docs/adr/history.md#75.
"""

import json
import shutil
from pathlib import Path

from models.training.train import PROGRESS

BASE = "large-trunk"  # as costly as the medium tier, and knows more


def make(work: Path) -> dict[str, object]:
    """Write work/judge from the finished trunk; return the trunk's figures.

    Raises:
        FileNotFoundError: The trunk is not finished.
    """
    figures: dict[str, object] = json.loads((work / f"{BASE}.figures.json").read_text())
    shutil.rmtree(work / "judge", ignore_errors=True)
    shutil.copytree(work / BASE, work / "judge", ignore=shutil.ignore_patterns(PROGRESS))
    return figures
