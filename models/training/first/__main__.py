"""Train the shipped models from scratch: `python -m models.training.first [--out FOLDER]`.

Takes hours; an interrupted run resumes.
"""

import argparse
import json
from pathlib import Path

from models.training.first import cards, judge, measure, predictor, train

STEPS = (*measure.TIERS, "judge", "measure", "predictor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/family"))
    parser.add_argument("--work", type=Path, default=Path(".cache/training"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=STEPS, action="append", help="steps to run, in this order; default: all")
    args = parser.parse_args()
    for step in args.only or STEPS:
        print(f"== {step}", flush=True)
        if step == "measure":
            figures = measure.measure(args.out, args.work, args.threads)
            cards.write_cards(args.out)
            print(json.dumps(figures["cascade"], indent=1))
            continue
        if step == "predictor":
            print("AUC by tier on prompts that were held out:", predictor.train(args.out, args.threads).auc)
            continue
        if step == "judge":
            figures = judge.train(args.out, args.work / "judge", args.threads)
        else:
            figures = train.train(step, args.out / step, args.work, threads=args.threads)
        (args.work / f"{step}.figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
