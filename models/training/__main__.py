"""Train the models: `python -m models.training --work FOLDER`. Takes hours; an interrupted run resumes.

FOLDER/first has the small, medium and large model of the first edition, from which these are grown. Finished models and
their figures stay in FOLDER; a model with figures is not trained again. FOLDER/driver.pid is the id of this process.

`--family FAMILY` begins a new FOLDER with installed models. A tier that `--go-on` names is trained on from there, if its
recipe has more tokens by now.
"""

import argparse
import json
import os
from pathlib import Path

from models.training import cards, judge, measure
from models.training.first import train as first
from models.training.hardware import device_named
from models.training.train import RECIPES, train

FIRST = tuple(f"first/{name}" for name in first.RECIPES)
STEPS = (*FIRST, *RECIPES, "judge", "measure")


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
    parser.add_argument("--family", type=Path, help="begin with the models that are installed there")
    parser.add_argument("--go-on", choices=measure.TIERS, action="append", help="with --family: train this tier on")
    parser.add_argument("--until-tokens", type=int, help="end each tier early, to test a recipe")
    args = parser.parse_args()
    if args.install:
        cards.install(args.work, args.install)
        return
    device = device_named(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.go_on and not args.family:
        parser.error("--go-on needs --family")
    if args.family:
        cards.take_up(args.family, args.work, args.go_on or ())
    (args.work / "driver.pid").write_text(f"{os.getpid()}\n")
    for name in args.only or STEPS:
        path = args.work / f"{name}.figures.json"
        if path.exists() or (name in FIRST and not grown_from_first(args.work)):
            continue
        print(f"== {name}", flush=True)
        if name == "measure":
            figures = measure.measure(args.work, args.threads)
        elif name == "judge":
            figures = judge.make(args.work)
        elif name in FIRST:
            figures = first.train(Path(name).name, args.work / name, args.work / "first", threads=args.threads)
        else:
            figures = train(name, args.work, args.threads, args.until_tokens, device)
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
