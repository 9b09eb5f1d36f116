"""`python -m benchmarks.gpu [--device DEVICE] [--shape SHAPE ...] [--engine ENGINE ...] [--limit-s SECONDS]`."""

import argparse
import sys

from benchmarks import gpu
from benchmarks.gpu.shapes import SHAPES
from benchmarks.public_data import NO_GPU_STATUS, GpuMissing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu; default: cuda")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: 1b and 8b")
    parser.add_argument("--engine", action="append", choices=gpu.ENGINES, help="default: both")
    parser.add_argument("--limit-s", type=float, default=gpu.LIMIT_S, help="seconds that the command may take")
    args = parser.parse_args()
    if args.limit_s <= 0:
        parser.error("--limit-s must be more than 0")
    name = "gpu" if args.device.startswith("cuda") else "gpu_cpu"
    try:
        gpu.measure(args.shape or ("1b", "8b"), args.engine or gpu.ENGINES, args.device, args.limit_s, name)
    except GpuMissing as missing:
        print(f"skipped: {missing}", flush=True)
        sys.exit(NO_GPU_STATUS)


if __name__ == "__main__":
    main()
