"""`python -m penstock.judge_service.calibrate`: fit a scorer's calibration, or a combination's weights, to samples."""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.judge_service.calibration.isotonic import CalibrationError
from penstock.judge_service.compose import read_options
from penstock.judge_service.scoring.extension import Labels, ScorerSite
from penstock.judge_service.scoring.guards import Guard, objection
from penstock.judge_service.scoring.interface import RawScore
from penstock.services.domain.errors import PenstockError
from penstock.services.extensions.scorers import scorer_problems
from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.types.judging import JudgedAnswer, LogprobSummary
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import FinishReason

BATCH = 64


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
    options = read_options(mesh, by_name[name])
    async with AsyncExitStack() as stack:
        parts = []
        for part in options.fitted_to(ScorerSite(mesh, by_name[name], settings, {})):
            known = scorer_problems(mesh, by_name[part], settings)
            if problems := [
                p for p in known if not p.field.endswith(".calibration")
            ]:  # it may be what is to be written
                raise SettingsError(joined(problems), problems)
            site = ScorerSite(mesh, by_name[part], settings, {})
            parts.append(await read_options(mesh, by_name[part]).patient().started(site, stack))
        scores: list[list[RawScore]] = [[] for _ in parts]
        for at in range(0, len(scored.answers), BATCH):
            batch = scored.answers[at : at + BATCH]
            for own, more in zip(scores, await asyncio.gather(*(part.score(batch) for part in parts)), strict=True):
                own += more
    labels = Labels(scored.good, [answer.tier for answer in scored.answers], scored.prompts)
    fitted = options.fit(scores, labels)
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
    except (SampleError, CalibrationError, SettingsError, PenstockError, OSError) as error:
        sys.exit(f"calibrate: {error}")


if __name__ == "__main__":
    main()
