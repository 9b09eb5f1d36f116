"""Train the shipped predictor of scores, and choose the thresholds and skip limits of the shipped mesh."""

import itertools
import json
from pathlib import Path
from typing import Any

from judge_service.calibration import Calibration
from models.training.answers import answer_all, score_all
from models.training.first import tasks
from models.training.first.measure import fit_problems, test_problems
from models.training.measure import SLACK, TIERS, all_answers, cascade_figures, costs_of, train_predictor
from models.training.operating_point import Answers, choose
from models.training.problems import Message, Problem

PROMPTS, SEED = 4000, 81
FIGURES = "skipping.json"


def measure(family: Path, threads: int) -> dict[str, Any]:
    """Write predictor.json and the figures into `family`. The rule is chosen on held-out prompts, reported on others."""
    calibration = Calibration.read(family / "judge" / "calibration.json")
    unseen = {p.key: as_chat(p) for p in itertools.islice(tasks.stream(SEED, held_out=False), PROMPTS)}
    predictor = train_predictor(family, list(unseen.values()), calibration, threads)
    fitting = [as_chat(p) for p in fit_problems()]
    lower = [a for tier in TIERS[:-1] for a in answer_all(family / tier, tier, fitting[:200], threads=threads)]
    costs = costs_of(family, lower)

    def answers(problems: list[Problem]) -> Answers:
        answered = {tier: answer_all(family / tier, tier, problems, threads=threads) for tier in TIERS}
        scores = {
            tier: [calibration.apply(raw) for raw in score_all(family / "judge", given, threads=threads)]
            for tier, given in answered.items()
        }
        return all_answers(answered, scores, predictor, costs)

    rule = choose(answers(fitting), SLACK)
    figures = {
        "predictor": {"prompts": predictor.samples, "auc": dict(zip(predictor.tiers, predictor.auc, strict=True))},
        "step_cost_ms": costs.step,
        "read_cost_ms": costs.read,
        "thresholds": dict(zip(TIERS, rule.thresholds, strict=False)),
        "skip_below": dict(zip(TIERS, rule.skip_below, strict=False)),
        "cascade": cascade_figures(answers([as_chat(p) for p in test_problems()]), rule),
    }
    (family / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def as_chat(problem: tasks.Problem) -> Problem:
    """The problem as a chat of one message."""
    message = Message("user", problem.prompt)
    return Problem(problem.task, problem.level, (message,), problem.reply, problem.answer, (problem.key,), ())
