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
from models.training.first import train as first
from models.training.hardware import device_named
from models.training.train import RECIPES, Run, train

FIRST = tuple(f"first/{name}" for name in first.RECIPES)
STEPS = (*FIRST, *RECIPES, "judge", "measure")
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


def grown_from_first(work: Path) -> bool:
    """Whether a model that begins with the first edition's weights is not finished yet."""
    growing = [name for name, recipe in RECIPES.items() if recipe.grows_from in FIRST]
    return any(not (work / f"{name}.figures.json").exists() for name in growing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
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
    if not any(args.work.glob("*.figures.json")) and WEIGHTS.exists():
        shutil.copytree(WEIGHTS, args.work, dirs_exist_ok=True)
    for name in args.only or STEPS:
        path = args.work / f"{name}.figures.json"
        if path.exists() or (name in FIRST and not grown_from_first(args.work)):
            continue
        print(f"== {name}", flush=True)
        if name == "measure":
            figures = measure.measure(args.work, args.threads)
        elif name == "judge":
            figures = judge.train(args.work, args.threads, device=device)
        elif name in FIRST:
            figures = first.train(Path(name).name, args.work / name, args.work / "first", threads=args.threads)
        else:
            figures = train(name, args.work, args.threads, args.until_tokens, device)
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
