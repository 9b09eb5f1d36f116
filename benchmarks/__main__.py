"""`python -m benchmarks [NAME ...] [--rounds N] [--quick]`: run all or the named benchmarks.

JSON and plots are written to results/.
"""

import argparse
import importlib
import sys

from benchmarks.public_data import NO_GPU_STATUS, DataMissing, GpuMissing

# Modules of this package, in the order in which they run.
BENCHMARKS = (
    "engine",
    "llamacpp",
    "real_models",
    "endpoints",
    "speculation",
    "speculation_simulated",
    "grammars",
    "escalation_drafts",
    "skipping_tiers",
    "accepted_errors",
    "burst_thresholds",
    "judge",
    "judge_bias",
    "overhead",
    "access_cost",
    "router_scaling",
    "router_streams",
    "simulator",
    "slo_admission",
    "slo_capacity",
    "slo_live",
    "kernel",
    "planner",
    "cheapest",
    "brute_force",
    "ablations",
    "parallelism",
    "table1",
    "table2",
    "step_times",
    "cascade",
    "rivals",
    "promises",
    "prefix_reuse",
    "best_answer",
    "end_to_end",
    "drift",
    "qoe",
    "stages",
    "known_lengths",
    "state",
    "scale",
    "stage_moves",
    "migration",
    "transport",
    "faults",
    "soak",
    "malformed",
    "sglang_flags",
    "sglang_moves",
    "sglang_overhead",
    "gpu",
)
QUICK = (
    "cascade",
    "end_to_end",
    "endpoints",
    "escalation_drafts",
    "faults",
    "malformed",
    "promises",
    "rivals",
    "scale",
    "skipping_tiers",
    "slo_capacity",
    "slo_live",
    "soak",
    "speculation",
)  # benchmarks that take minutes, with a quick version


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements")
    parser.add_argument("--quick", action="store_true", help=f"quick version of {', '.join(QUICK)}")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark '{unknown[0]}'; there are {', '.join(BENCHMARKS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    without_gpu = False
    for name in args.names or BENCHMARKS:
        print(f"== {name}", flush=True)
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            (module.run_quick if args.quick and name in QUICK else module.run)(args.rounds)
        except (DataMissing, GpuMissing) as missing:
            print(f"skipped: {missing}", flush=True)
            without_gpu |= isinstance(missing, GpuMissing)
    if without_gpu and args.names:  # it was named: a caller must be able to see that nothing was measured
        sys.exit(NO_GPU_STATUS)


if __name__ == "__main__":
    main()
