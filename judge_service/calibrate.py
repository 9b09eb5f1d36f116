"""`python -m penstock.judge_service.calibrate`: fit a scorer's calibration, or a combination's weights, to samples."""

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import StrictBool

from penstock.judge_service.calibration.fitted import CalibrationError
from penstock.judge_service.compose import read_options
from penstock.judge_service.scoring.extension import Sample, ScorerSite
from penstock.judge_service.scoring.guards import Guard, objection
from penstock.judge_service.scoring.interface import RawScore
from penstock.services.domain.errors import PenstockError
from penstock.services.extensions.scorers import scorer_problems
from penstock.services.field_problems import SettingsError, from_json, joined
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.types.judging import JudgedAnswer, LogprobSummary
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import FinishReason

BATCH = 64


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of a file of samples."""

    prompt: str
    answer: str
    good: StrictBool
    tier: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    mean_logprob: float | None = None
    min_logprob: float | None = None
    reference: str | None = None


def read_samples(path: Path) -> list[Sample]:
    """Read labelled answers.

    Raises:
        CalibrationError: A line is bad.
    """
    samples = list[Sample]()
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = from_json(_Row, line)
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: {error}") from None
        mean, least = row.mean_logprob, row.min_logprob
        answer = JudgedAnswer(
            ChatPrompt((ChatMessage("user", row.prompt),)),
            row.answer,
            tier=row.tier,
            finish_reason=row.finish_reason,
            logprobs=None if mean is None else LogprobSummary(0, mean, mean if least is None else least),
            reference=row.reference,
        )
        samples.append(Sample(answer, row.good, row.prompt))
    return samples


async def calibrate(mesh_file: Path, name: str, path: Path, out: Path) -> str:
    """Score the samples, fit a calibration or a combination and write it; return a summary.

    Raises:
        SettingsError: The mesh file is bad, or has no such scorer.
        CalibrationError: A line of the samples is bad, or they do not suffice.
    """
    mesh, settings = load_mesh_file(mesh_file), ServiceSettings.load(mesh_file=mesh_file)
    by_name = {scorer.name: scorer for scorer in mesh.judge.scorers}
    if name not in by_name:
        raise SettingsError(f"judge.scorers: no scorer '{name}'")
    samples, guards = read_samples(path), frozenset(map(Guard, mesh.judge.guards))
    scored = [sample for sample in samples if objection(sample.answer, guards) is None]
    guarded = len(samples) - len(scored)
    guard_note = f"; {guarded} more are refused by the guards" if guarded else ""
    options = read_options(mesh, by_name[name])
    async with AsyncExitStack() as stack:
        parts = []
        for part in options.fitted_to(ScorerSite(mesh, by_name[name], settings, {})):
            known = scorer_problems(mesh, by_name[part], settings)
            problems = [p for p in known if not p.field.endswith(".calibration")]  # it may be what is to be written
            if problems:
                raise SettingsError(joined(problems), problems)
            site = ScorerSite(mesh, by_name[part], settings, {})
            parts.append(await read_options(mesh, by_name[part]).patient().started(site, stack))
        scores: list[list[RawScore]] = [[] for _ in parts]
        for at in range(0, len(scored), BATCH):
            batch = [sample.answer for sample in scored[at : at + BATCH]]
            for own, more in zip(scores, await asyncio.gather(*(part.score(batch) for part in parts)), strict=True):
                own += more
    fitted = options.fit(scores, scored)
    fitted.write(out)
    return f"{out}: {fitted.summary}{guard_note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=Path, default=Path("mesh.yaml"))
    parser.add_argument("--scorer", required=True, help="name of the scorer in the mesh file")
    parser.add_argument("--samples", type=Path, required=True, help="JSONL: prompt, answer, good, ...")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        print(asyncio.run(calibrate(args.mesh, args.scorer, args.samples, args.out)))
    except (CalibrationError, SettingsError, PenstockError, OSError) as error:
        sys.exit(f"calibrate: {error}")


if __name__ == "__main__":
    main()
