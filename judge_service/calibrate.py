"""`python -m judge_service.calibrate`: fit a scorer's calibration on labelled samples and write it."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from judge_service.calibration import CalibrationError, fit
from judge_service.compose import build_scorer
from judge_service.scorers import JudgedAnswer, LogprobSummary, RawScore
from services.domain.errors import PenstockError
from services.domain.requests import ChatMessage, ChatPrompt
from services.mesh_file import load_mesh_file
from services.settings import ServiceSettings, SettingsError

BATCH = 64


class SampleError(Exception):
    """A bad line in the samples file; the message names it."""


def read_samples(path: Path) -> tuple[list[JudgedAnswer], list[bool]]:
    """Answers, and whether each is good.

    Raises:
        SampleError: A line is bad.
    """
    answers, good = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            mean = row.get("mean_logprob")
            answers.append(
                JudgedAnswer(
                    ChatPrompt((ChatMessage("user", row["prompt"]),)),
                    row["answer"],
                    logprobs=LogprobSummary(0, float(mean), float(mean)) if mean is not None else None,
                    reference=row.get("reference"),
                )
            )
            if not isinstance(row["good"], bool):
                raise TypeError("good must be true or false")
            good.append(row["good"])
        except KeyError as error:
            raise SampleError(f"{path}:{number}: {error.args[0]} is missing") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise SampleError(f"{path}:{number}: {error}") from None
    return answers, good


async def calibrate(mesh_file: Path, name: str, samples: Path, out: Path) -> str:
    """Score the samples, fit a calibration and write it; return a summary line.

    Raises:
        SettingsError: The mesh file is bad, or has no such scorer.
        SampleError: A line of the samples is bad.
        CalibrationError: The samples do not suffice.
    """
    mesh, settings = load_mesh_file(mesh_file), ServiceSettings.load(mesh_file=mesh_file)
    scorer_settings = next((scorer for scorer in mesh.judge.scorers if scorer.name == name), None)
    if scorer_settings is None:
        raise SettingsError(f"judge.scorers: no scorer '{name}'")
    answers, good = read_samples(samples)
    scorer = build_scorer(scorer_settings, mesh, settings)
    await scorer.start()
    try:
        scores: list[RawScore] = []
        for at in range(0, len(answers), BATCH):
            scores += await scorer.score(answers[at : at + BATCH])
    finally:
        await scorer.close()
    calibration = fit([s.raw for s in scores], good, [s.score for s in scores])
    calibration.write(out)
    brier = f"Brier score {calibration.brier:.3f} (without calibration {calibration.brier_before:.3f})"
    return f"{out}: {calibration.samples} samples, {brier}"


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
