"""Reads the score predictor that a mesh file names."""

from pathlib import Path

from penstock.services.domain.score_prediction import PredictorError, ScorePredictor


def read_score_predictor(path: Path) -> ScorePredictor:
    """Read a file of `penstock predictor`.

    Raises:
        PredictorError: It cannot be read, or is no score predictor; the message names the file and the field.
    """
    try:
        return ScorePredictor.from_json(path.read_text())
    except (PredictorError, OSError, UnicodeDecodeError) as error:
        raise PredictorError(f"{path}: {error}") from None
