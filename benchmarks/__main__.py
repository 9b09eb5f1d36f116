"""`python -m benchmarks [NAME ...] [--rounds N]`: all benchmarks, or the named ones. JSON and plots go to results/."""

import argparse

from benchmarks import engine, overhead, planner, sglang_moves, sglang_overhead, simulator

BENCHMARKS = {
    "engine": engine.run,
    "overhead": overhead.run,
    "sglang_overhead": sglang_overhead.run,
    "sglang_moves": sglang_moves.run,
    "simulator": simulator.run,
    "planner": planner.run,
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
        BENCHMARKS[name](args.rounds)


if __name__ == "__main__":
    main()
