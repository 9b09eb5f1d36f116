"""The figures of runs: quality, goodput, latency and CPU time of one run; intervals, ratios and forecasts over rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.end_to_end.systems import Forecast
from benchmarks.spread import interval, percentile
from penstock.cli.replay import Outcome, Run
from penstock.client.judging import Answered, AsyncJudge

SCORED_AT_ONCE = 16

Row = dict[str, Any]


class Scores:
    """The judge's scores of answers. The same text is scored once: answers are greedy, so most come again.

    scorer: one that needs no log-probabilities, which replays do not ask for; empty: the judge's default.
    """

    def __init__(self, scorer: str = "") -> None:
        self._scorer = scorer
        self._known: dict[tuple[str, str, str], float] = {}

    async def of(self, run: Run, judge: AsyncJudge) -> list[float]:
        """The scores of the answers of a run, in the order of `run.answered`."""
        new = {key: outcome for outcome, _ in run.answered if (key := _key(outcome)) not in self._known}
        pending = list(new.items())
        for at in range(0, len(pending), SCORED_AT_ONCE):
            part = pending[at : at + SCORED_AT_ONCE]
            answers = [Answered(o.question.prompt, o.reply, o.question.answer) for _, o in part if o.reply is not None]
            self._known |= zip((key for key, _ in part), await judge.score(answers, self._scorer), strict=True)
        return [self._known[_key(outcome)] for outcome, _ in run.answered]


def _key(outcome: Outcome) -> tuple[str, str, str]:
    assert outcome.reply is not None
    return repr(outcome.question.prompt), outcome.reply.tier, outcome.reply.text


def run_figures(run: Run, scores: Sequence[float], rate_per_s: float, slo_s: float) -> Row:
    """The figures of one run. A request that failed is wrong and late; latencies are of those that were answered.

    accuracy: share of right answers. judge_score: their mean score. quality: what plans are made for; as in the planner's
    quality file, the right ones of those that were answered in percent, or the mean score where not all right answers are
    known. goodput_per_s: the offered rate times the share of requests answered within the SLO. Tokens are those computed by
    all tiers; of prompts, without what was in a prefix cache.
    """
    answered = run.answered
    latencies = [outcome.latency_s for outcome, _ in answered]
    first = [outcome.first_s for outcome, _ in answered if outcome.first_s is not None]
    work = [tier.usage for _, reply in answered for tier in reply.tiers]
    attained = sum(latency_s <= slo_s for latency_s in latencies) / len(run.outcomes)
    tiers = [reply.tier for _, reply in answered]
    count = max(1, len(answered))
    score = sum(scores) / len(scores) if scores else None
    known = all(outcome.question.answer is not None for outcome in run.outcomes)
    return {
        "requests": len(run.outcomes),
        "failed": len(run.outcomes) - len(answered),
        "accuracy": sum(outcome.correct for outcome in run.outcomes) / len(run.outcomes),
        "judge_score": score,
        "quality": 100 * sum(outcome.correct for outcome, _ in answered) / count if known and answered else score,
        "attained": attained,
        "goodput_per_s": rate_per_s * attained,
        "answers_per_s": len(answered) / run.seconds,
        "latency_p50_s": percentile(latencies, 50),
        "latency_p95_s": percentile(latencies, 95),
        "first_visible_p50_s": percentile(first, 50),
        "first_visible_p95_s": percentile(first, 95),
        "output_tokens_per_answer": sum(usage.output_tokens for usage in work) / count,
        "prompt_tokens_per_answer": sum(usage.prompt_tokens - usage.cached_prompt_tokens for usage in work) / count,
        "cpu_s_per_answer": run.cpu_s / len(answered) if answered else None,
        "answered_by": {tier: tiers.count(tier) / len(tiers) for tier in sorted(set(tiers))},
        "errors": sorted({outcome.error[:160] for outcome in run.outcomes if outcome.error})[:5],
    }


MEASURED = (
    "accuracy",
    "quality",
    "judge_score",
    "attained",
    "goodput_per_s",
    "answers_per_s",
    "latency_p50_s",
    "latency_p95_s",
    "first_visible_p50_s",
    "first_visible_p95_s",
    "output_tokens_per_answer",
    "prompt_tokens_per_answer",
    "cpu_s_per_answer",
)
"""Figures of a run that are summed up over rounds."""
CAUSES = ("hindsight", "slower_steps")  # as in `explained`
FORECAST = {"p50_s": "latency_p50_s", "p95_s": "latency_p95_s", "answers_per_s": "answers_per_s"}
"""Figures of a forecast, and those of a run that they are compared with."""


def system_summary(rows: Sequence[Row], forecasts: Sequence[Forecast], corrected: Sequence[Forecast] = ()) -> Row:
    """One system in one cell: intervals of what was measured, the mean forecast, and its relative errors by round.

    error_of_means: of the mean forecast against the mean of what was measured. Where a round has few requests, a mean of
    errors by round is too high: rounds with short tails weigh more.
    corrected: forecasts of all rounds but the first, with the step times of the round before.
    """
    measured = {
        name: interval([row[name] for row in rows if row[name] is not None])
        for name in MEASURED
        if any(row[name] is not None for row in rows)
    }
    predicted = {
        name: float(np.mean([getattr(forecast, name) for forecast in forecasts])) for name in asdict(forecasts[0])
    }

    def errors_of(some: Sequence[Forecast], of_rows: Sequence[Row]) -> Row:
        return {
            name: interval(
                [getattr(f, name) / row[of] - 1 for f, row in zip(some, of_rows, strict=True) if row[of] is not None]
            )
            for name, of in FORECAST.items()
            if any(row[of] is not None for row in of_rows)
        }

    errors = errors_of(forecasts, rows)
    points = [f.quality - row["quality"] for f, row in zip(forecasts, rows, strict=True) if row["quality"] is not None]
    if points:
        errors["quality_points"] = interval(points)
    return {
        "measured": measured,
        "forecast": predicted,
        "forecast_error": errors,
        "error_of_means": {
            name: predicted[name] / measured[of]["mean"] - 1 for name, of in FORECAST.items() if of in measured
        },
        "corrected_error": errors_of(corrected, rows[1:]) if corrected else None,
        "explained": _explained(rows),
    }


def _explained(rows: Sequence[Row]) -> Row | None:
    """Intervals of what the runs were explained by, and by how much each simulation is off in shares of what was measured."""
    pairs = [(row, row["explained"]) for row in rows if row.get("explained")]
    if not pairs:
        return None
    errors = {
        f"{cause}_{name}_error": interval(
            [why[f"{cause}_{name}_s"] / row[f"latency_{name}_s"] - 1 for row, why in pairs]
        )
        for cause in CAUSES
        for name in ("p50", "p95")
    }
    summary: Row = {}
    for name, first in pairs[0][1].items():
        values = [why[name] for _, why in pairs]
        if isinstance(first, (tuple, list)):  # by tier
            by_tier = [[value for value in of_tier if value is not None] for of_tier in zip(*values, strict=True)]
            summary[name] = [interval(of_tier) if of_tier else None for of_tier in by_tier]
        else:
            summary[name] = interval(values)
    return summary | errors


def comparisons(rows: Mapping[str, Sequence[Row]], ours: str = "plan") -> dict[str, Row]:
    """Our plan against each other system, round by round: ratios of goodput and CPU time, points of accuracy."""
    result = {}
    for name, others in rows.items():
        if name == ours:
            continue
        pairs = list(zip(rows[ours], others, strict=True))
        goodput = [a["goodput_per_s"] / b["goodput_per_s"] for a, b in pairs if b["goodput_per_s"]]
        cpu = [
            a["cpu_s_per_answer"] / b["cpu_s_per_answer"]
            for a, b in pairs
            if a["cpu_s_per_answer"] and b["cpu_s_per_answer"]
        ]
        result[name] = {
            "goodput_ratio": interval(goodput) if goodput else None,
            "cpu_ratio": interval(cpu) if cpu else None,
            "accuracy_points": interval([100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]),
        }
    return result


def sustained(cells: Sequence[Row], ours: str = "plan") -> list[Row]:
    """By layout and quality target: the highest mean goodput of each system over the rates, and ours over each other's."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for cell in cells:
        groups.setdefault((cell["layout"], cell["quality_below_largest"]), []).append(cell)
    result = []
    for (layout, below), members in groups.items():
        best = {
            name: max(cell["systems"][name]["measured"]["goodput_per_s"]["mean"] for cell in members)
            for name in members[0]["systems"]
        }
        ratios = {name: best[ours] / value for name, value in best.items() if name != ours and value}
        result.append({"layout": layout, "quality_below_largest": below, "goodput_per_s": best, "plan_over": ratios})
    return result
