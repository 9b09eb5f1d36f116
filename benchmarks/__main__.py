"""`python -m benchmarks [NAME ...] [--rounds N] [--quick]`: all benchmarks, or those named. JSON and plots go to results/."""

import argparse

from benchmarks import (
    engine,
    overhead,
    planner,
    sglang_moves,
    sglang_overhead,
    simulator,
    stage_moves,
    state,
    table1,
    table2,
)
from benchmarks.public_data import DataMissing

BENCHMARKS = {
    "engine": engine.run,
    "overhead": overhead.run,
    "sglang_overhead": sglang_overhead.run,
    "sglang_moves": sglang_moves.run,
    "simulator": simulator.run,
    "planner": planner.run,
    "stage_moves": stage_moves.run,
    "state": state.run,
    "table1": table1.run,
    "table2": table2.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark '{unknown[0]}'; there are {', '.join(BENCHMARKS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    for name in args.names or BENCHMARKS:
        print(f"== {name}", flush=True)
        try:
            BENCHMARKS[name](args.rounds)
        except DataMissing as missing:
            print(f"skipped: {missing}", flush=True)


if __name__ == "__main__":
    main()
