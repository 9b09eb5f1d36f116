"""Train the shipped predictor of scores, for the skip limits of the shipped mesh, on problems that are not held out."""

import itertools
from pathlib import Path

from judge_service.calibration import Calibration
from models.training.first import tasks
from models.training.measure import train_predictor
from models.training.problems import Message, Problem
from services.domain.score_prediction import ScorePredictor

PROMPTS, SEED = 4000, 81


def train(family: Path, threads: int) -> ScorePredictor:
    """Write predictor.json into `family`, which holds the tiers and the calibrated judge."""
    calibration = Calibration.read(family / "judge" / "calibration.json")
    problems = {p.key: as_chat(p) for p in itertools.islice(tasks.stream(SEED, held_out=False), PROMPTS)}
    return train_predictor(family, list(problems.values()), calibration, threads)


def as_chat(problem: tasks.Problem) -> Problem:
    """The problem as a chat of one message."""
    message = Message("user", problem.prompt)
    return Problem(problem.task, problem.level, (message,), problem.reply, problem.answer, (problem.key,), ())
