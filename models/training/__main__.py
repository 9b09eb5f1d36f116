"""Train the models: `python -m models.training --work FOLDER`. Takes hours; an interrupted run resumes.

FOLDER/first has the small, medium and large model of the first edition, from which these are grown. Finished models and
their figures stay in FOLDER; a model with figures is not trained again. A new FOLDER begins with the weights of models
that are finished or on their way in `weights/` (`--export`). FOLDER/driver.pid is the id of this process.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

from models.training import cards, judge, measure
from models.training.hardware import device_named
from models.training.train import RECIPES, Run, train

STEPS = (*RECIPES, "judge", "measure")
WEIGHTS = Path(__file__).parent / "weights"


def export(name: str, work: Path) -> None:
    """Copy a model of `work`, finished or not, to WEIGHTS."""
    figures = work / f"{name}.figures.json"
    if not figures.exists():
        Run(name, work, 1).export()
    shutil.rmtree(WEIGHTS / name, ignore_errors=True)
    shutil.copytree(work / name, WEIGHTS / name)
    if figures.exists():
        shutil.copy(figures, WEIGHTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--first", type=Path, default=Path("models/family"), help="the first edition, copied to work/first"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the models are trained"
    )
    parser.add_argument("--only", choices=STEPS, action="append", help="steps to run, in this order; default: all")
    parser.add_argument(
        "--install", type=Path, metavar="FAMILY", help="install the finished models and their cards there"
    )
    parser.add_argument(
        "--export",
        choices=tuple(RECIPES),
        action="append",
        help="write the weights of models that are on their way to weights/",
    )
    parser.add_argument("--until-tokens", type=int, help="end each tier early, to test a recipe")
    args = parser.parse_args()
    if args.install:
        cards.install(args.work, args.install)
        return
    device = device_named(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.export:
        for name in args.export:
            export(name, args.work)
        return
    (args.work / "driver.pid").write_text(f"{os.getpid()}\n")
    if not (args.work / "first").exists():
        shutil.copytree(args.first, args.work / "first")
        if WEIGHTS.exists():
            shutil.copytree(WEIGHTS, args.work, dirs_exist_ok=True)
    for name in args.only or STEPS:
        path = args.work / f"{name}.figures.json"
        if path.exists():
            continue
        print(f"== {name}", flush=True)
        if name == "measure":
            figures = measure.measure(args.work, args.threads)
        elif name == "judge":
            figures = judge.train(args.work, args.threads, device=device)
        else:
            figures = train(name, args.work, args.threads, args.until_tokens, device)
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
