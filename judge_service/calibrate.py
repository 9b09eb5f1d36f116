"""`python -m judge_service.calibrate`: fit a scorer's calibration, or a combination's weights, to labelled samples."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from judge_service.calibration import Calibration, CalibrationError, fit
from judge_service.combination import ALL_TIERS, Combination, fit_combination
from judge_service.compose import build_scorer, started
from judge_service.guards import Guard, objection
from judge_service.scorers import JudgedAnswer, LogprobSummary, RawScore, Scorer
from judge_service.scorers.combined import raw_scores
from services.domain.errors import PenstockError
from services.domain.requests import ChatMessage, ChatPrompt, FinishReason
from services.field_problems import SettingsError
from services.mesh_file import load_mesh_file
from services.mesh_schema import MeshFile, MeshScorer
from services.settings import ServiceSettings

BATCH = 64
ANSWER_S = 300.0
"""Of one answer. A whole batch is asked for at once and no client waits, so a model has longer than in service."""


class SampleError(Exception):
    """A bad line in the samples file; the message names it."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Labelled answers. prompts: the texts, by which answers to one prompt are kept together in cross-validation."""

    answers: list[JudgedAnswer]
    good: list[bool]
    prompts: list[str]

    def scored(self, guards: frozenset[Guard]) -> "Samples":
        """The samples that reach a scorer: those that pass the guards."""
        rows = [i for i, answer in enumerate(self.answers) if objection(answer, guards) is None]
        return Samples([self.answers[i] for i in rows], [self.good[i] for i in rows], [self.prompts[i] for i in rows])


def read_samples(path: Path) -> Samples:
    """Read labelled answers.

    Raises:
        SampleError: A line is bad.
    """
    samples = Samples([], [], [])
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            mean, least = row.get("mean_logprob"), row.get("min_logprob")
            logprobs = None
            if mean is not None:
                logprobs = LogprobSummary(0, float(mean), float(mean if least is None else least))
            answer = JudgedAnswer(
                ChatPrompt((ChatMessage("user", row["prompt"]),)),
                row["answer"],
                tier=str(row.get("tier", "")),
                finish_reason=FinishReason(row.get("finish_reason", "stop")),
                logprobs=logprobs,
                reference=row.get("reference"),
            )
            if not isinstance(row["good"], bool):
                raise TypeError("good must be true or false")
            samples.answers.append(answer)
            samples.good.append(row["good"])
            samples.prompts.append(row["prompt"])
        except KeyError as error:
            raise SampleError(f"{path}:{number}: {error.args[0]} is missing") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise SampleError(f"{path}:{number}: {error}") from None
    return samples


async def calibrate(mesh_file: Path, name: str, path: Path, out: Path) -> str:
    """Score the samples, fit a calibration or a combination and write it; return a summary.

    Raises:
        SettingsError: The mesh file is bad, or has no such scorer.
        SampleError: A line of the samples is bad.
        CalibrationError: The samples do not suffice.
    """
    mesh, settings = load_mesh_file(mesh_file), ServiceSettings.load(mesh_file=mesh_file)
    by_name = {scorer.name: scorer for scorer in mesh.judge.scorers}
    if name not in by_name:
        raise SettingsError(f"judge.scorers: no scorer '{name}'")
    samples = read_samples(path)
    scored = samples.scored(frozenset(map(Guard, mesh.judge.guards)))
    guarded = len(samples.good) - len(scored.good)
    guard_note = f"; {guarded} more are refused by the guards" if guarded else ""
    if by_name[name].kind == "combined":
        parts = [by_name[part] for part in by_name[name].scorers]
        combination = await _combine(parts, mesh, settings, scored)
        combination.write(out)
        return f"{out}{guard_note}\n{_by_tier(combination)}"
    calibration = await _calibrate(by_name[name], mesh, settings, scored)
    calibration.write(out)
    brier = f"Brier score {calibration.brier:.3f} cross-validated (without calibration {calibration.brier_before:.3f})"
    return f"{out}: {calibration.samples} samples{guard_note}, AUC {calibration.auc:.3f}, {brier}"


async def _calibrate(
    scorer_settings: MeshScorer, mesh: MeshFile, settings: ServiceSettings, samples: Samples
) -> Calibration:
    scorer = build_scorer(_patient(scorer_settings), mesh, settings)
    await started(scorer_settings, scorer)
    try:
        scores: list[RawScore] = []
        for at in range(0, len(samples.answers), BATCH):
            scores += await scorer.score(samples.answers[at : at + BATCH])
    finally:
        await scorer.close()
    return fit([s.raw for s in scores], samples.good, [s.score for s in scores], samples.prompts)


def _patient(scorer: MeshScorer) -> MeshScorer:
    """The scorer with time to answer a batch. Not for code, whose limit is part of what its score means."""
    if scorer.kind not in ("llm", "reward", "consistency"):
        return scorer
    return scorer.model_copy(update={"timeout_s": max(scorer.timeout_s, ANSWER_S)})


async def _combine(
    parts_settings: Seq[MeshScorer], mesh: MeshFile, settings: ServiceSettings, samples: Samples
) -> Combination:
    parts: list[Scorer] = []
    try:
        for part_settings in parts_settings:
            part = build_scorer(_patient(part_settings), mesh, settings)
            await started(part_settings, part)
            parts.append(part)
        raws: list[list[float]] = []
        for at in range(0, len(samples.answers), BATCH):
            raws += await raw_scores(parts, samples.answers[at : at + BATCH])
    finally:
        for part in parts:
            await part.close()
    tiers = [answer.tier for answer in samples.answers]
    return fit_combination([part.name for part in parts_settings], raws, samples.good, tiers, samples.prompts)


def _by_tier(combination: Combination) -> str:
    return "\n".join(
        f"{'all tiers' if tier == ALL_TIERS else tier}: {model.samples} samples, AUC {model.auc:.3f}, "
        f"Brier score {model.brier:.3f} cross-validated"
        for tier, model in combination.models.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=Path, default=Path("mesh.yaml"))
    parser.add_argument("--scorer", required=True, help="name of the scorer in the mesh file")
    parser.add_argument("--samples", type=Path, required=True, help="JSONL: prompt, answer, good, ...")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        print(asyncio.run(calibrate(args.mesh, args.scorer, args.samples, args.out)))
    except (SampleError, CalibrationError, SettingsError, PenstockError, OSError) as error:
        sys.exit(f"calibrate: {error}")


if __name__ == "__main__":
    main()
