"""`python -m penstock.judge_service.calibrate`."""

import json
import random
from pathlib import Path

import pytest

from penstock.judge_service.calibrate import SampleError, calibrate, read_samples
from penstock.judge_service.calibration.isotonic import Calibration, CalibrationError
from penstock.services.field_problems import SettingsError
from tests.conftest import MeshFileMaker


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


async def test_a_calibration_is_fitted_and_written(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    rng = random.Random(1)
    rows: list[object] = []
    for _ in range(200):
        mean = -rng.random() * 2
        rows.append({"prompt": "p", "answer": "a", "mean_logprob": mean, "good": rng.random() < 1 + mean / 2})
    out = tmp_path / "calibration.json"
    said = await calibrate(mesh_file(), "confidence", write(tmp_path / "samples.jsonl", rows), out)
    assert "200 samples" in said
    made = Calibration.read(out)
    assert made.apply(-0.1) > made.apply(-1.5)
    assert made.brier <= made.brier_before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", ":2: "),
        ({"prompt": "p"}, ":2: answer is missing"),
        ({"prompt": "p", "answer": "a", "good": "yes"}, "good"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, said: str) -> None:
    good = {"prompt": "p", "answer": "a", "good": True}
    with pytest.raises(SampleError, match=said):
        read_samples(write(tmp_path / "samples.jsonl", [good, row]))


async def test_unknown_scorers_and_too_few_samples_are_refused(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    samples = write(tmp_path / "s.jsonl", [{"prompt": "p", "answer": "a", "mean_logprob": -1, "good": True}])
    with pytest.raises(SettingsError, match="vibes"):
        await calibrate(mesh_file(), "vibes", samples, tmp_path / "out")
    with pytest.raises(CalibrationError):
        await calibrate(mesh_file(), "confidence", samples, tmp_path / "out")
