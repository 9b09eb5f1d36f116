"""Write the gRPC stubs from protos/ into penstock/proto/: `python scripts/generate_stubs.py [--check]`.

With --check, nothing is written; the exit status tells whether the stubs are up to date.
"""

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "router", "worker", "planner", "judge")
STUBS = Path("penstock/proto")  # one Python package for all of them; the protobuf packages stay penstock.<name>.v1
_PYTHON_MODULE = re.compile(r"\bpenstock\.(\w+)\.v1(?=\.\w+_pb2| import \w+_pb2)")


def generate(into: Path) -> None:
    """Write the stubs to `into`, laid out as in the repository."""
    with tempfile.TemporaryDirectory() as folder:
        run_protoc(Path(folder))
        for path in Path(folder).rglob("*.py*"):
            stub = into / STUBS / path.relative_to(Path(folder) / "penstock")
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(moved(path.read_text()))
    packages = {STUBS: "protos/penstock"}
    for name in PACKAGES:
        packages |= {STUBS / name: f"protos/penstock/{name}", STUBS / name / "v1": f"protos/penstock/{name}/v1"}
    for package, source in packages.items():
        (into / package / "__init__.py").write_text(f'"""Stubs generated from {source}."""\n')
    for unused in (into / STUBS / "common/v1").glob("*_grpc.py*"):
        unused.unlink()  # common has no service


def moved(stub: str) -> str:
    """Replace the module names of protoc by those under `STUBS`.

    Names of services and messages, and paths of proto files, do not change, because they are part of the protocol.
    """
    return _PYTHON_MODULE.sub(r"penstock.proto.\1.v1", stub)


def run_protoc(into: Path) -> None:
    """Run protoc on protos/ and write its output to `into`."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        generated = {p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()}
        existing = {
            p.relative_to(ROOT) for p in (ROOT / STUBS).rglob("*") if p.is_file() and "__pycache__" not in p.parts
        }
        stale = [
            p for p in generated if p not in existing or not filecmp.cmp(Path(folder) / p, ROOT / p, shallow=False)
        ]
        obsolete = sorted(existing - generated)
        if check:
            if stale or obsolete:
                sys.exit(
                    f"stubs differ from protos/: run `make stubs` ({', '.join(map(str, sorted(stale) + obsolete))})"
                )
            return
        for path in obsolete:
            (ROOT / path).unlink()
        for path in stale:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / path, ROOT / path)


if __name__ == "__main__":
    main()
