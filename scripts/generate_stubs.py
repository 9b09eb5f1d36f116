"""Write the gRPC stubs from protos/ into penstock/: `python scripts/generate_stubs.py [--check]`.

With --check nothing is written: the exit status tells whether the stubs in the tree are the ones protos/ gives.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "router", "worker", "planner", "judge")


def generate(into: Path) -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_out={into}",
        f"--mypy_grpc_out={into}",
        *map(str, protos),
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed: see above")
    for package in PACKAGES:
        for folder, text in (
            (into / "penstock" / package, f'"""Stubs generated from protos/penstock/{package}."""\n'),
            (into / "penstock" / package / "v1", f'"""Stubs generated from protos/penstock/{package}/v1."""\n'),
        ):
            (folder / "__init__.py").write_text(text)
    for unused in (into / "penstock/common/v1").glob("*_grpc.py*"):
        unused.unlink()  # common has no service


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made = {p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()}
        standing = {
            p.relative_to(ROOT)
            for package in PACKAGES
            for p in (ROOT / "penstock" / package).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        }
        stale = [p for p in made if p not in standing or not filecmp.cmp(Path(folder) / p, ROOT / p, shallow=False)]
        left = sorted(standing - made)
        if check:
            if stale or left:
                sys.exit(f"stubs differ from protos/: run `make stubs` ({', '.join(map(str, sorted(stale) + left))})")
            return
        for path in left:
            (ROOT / path).unlink()
        for path in stale:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / path, ROOT / path)


if __name__ == "__main__":
    main()
