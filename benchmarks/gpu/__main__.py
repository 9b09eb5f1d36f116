"""`python -m benchmarks.gpu [--device D] [--shape SHAPE ...] [--model FOLDER ...] [--engine ENGINE ...] [--limit-s S]`."""

import argparse
import sys
from pathlib import Path

from benchmarks import gpu
from benchmarks.gpu.shapes import SHAPES, shape_of
from benchmarks.public_data import NO_GPU_STATUS, GpuMissing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu; default: cuda")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: 1b and 8b")
    parser.add_argument(
        "--model", action="append", type=Path, help="a folder in Hugging Face format; torch engine only"
    )
    parser.add_argument("--engine", action="append", choices=gpu.ENGINES, help="default: both")
    parser.add_argument("--limit-s", type=float, default=gpu.LIMIT_S, help="seconds that the command may take")
    args = parser.parse_args()
    if args.limit_s <= 0:
        parser.error("--limit-s must be more than 0")
    if args.model and args.engine:
        parser.error("--engine: a --model is measured on the torch engine alone")
    shapes = [SHAPES[name] for name in args.shape or ([] if args.model else ("1b", "8b"))]
    shapes += [shape_of(folder) for folder in args.model or ()]
    engines = ("torch",) if args.model else args.engine or gpu.ENGINES
    name = "gpu" if args.device.startswith("cuda") else "gpu_cpu"
    try:
        gpu.measure(shapes, engines, args.device, args.limit_s, name)
    except GpuMissing as missing:
        print(f"skipped: {missing}", flush=True)
        sys.exit(NO_GPU_STATUS)


if __name__ == "__main__":
    main()
