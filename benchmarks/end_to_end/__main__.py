"""`python -m benchmarks.end_to_end [--mesh FILE] [--questions FILE] [--rounds N] [--below POINTS ...] [--layout NAME]
[--run-s SECONDS] [--quick]`: for any family and mesh file."""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks import end_to_end
from benchmarks.end_to_end.site import layouts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__)
    parser.add_argument(
        "--mesh", type=Path, default=end_to_end.MESH_FILE, help="mesh file with the tiers and the judge"
    )
    parser.add_argument(
        "--questions", type=Path, help="held-out prompts with answers; without it, drawn for the shipped family"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements")
    parser.add_argument("--quick", action="store_true", help="one layout, one target, two rates, one round")
    parser.add_argument(
        "--below",
        type=float,
        nargs="+",
        metavar="POINTS",
        help="quality targets, in points below the largest model's mean",
    )
    parser.add_argument(
        "--layout",
        choices=[layout.name for layout in layouts()],
        help="this layout only, written to a file of its name",
    )
    parser.add_argument("--run-s", type=float, help="how long requests arrive in a run, in seconds")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.run_s is not None and args.run_s <= 0:
        parser.error("--run-s must be over 0")
    make = end_to_end.quick if args.quick else end_to_end.full
    setup = make(args.rounds, args.mesh, *([args.questions] if args.questions else []))
    if args.below:
        setup = replace(setup, below_largest=tuple(args.below))
    if args.run_s:
        setup = replace(setup, run_s=args.run_s)
    name = f"end_to_end{'_quick' if args.quick else ''}"
    if args.layout:
        setup = replace(setup, layouts=tuple(layout for layout in layouts() if layout.name == args.layout))
        name = f"{name}_{args.layout}"
    end_to_end.publish(setup, name)


if __name__ == "__main__":
    main()
