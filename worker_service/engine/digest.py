"""Identifies a model by a digest of its folder."""

import hashlib
from pathlib import Path

FULL_HASH_BYTES = 64 * 1024 * 1024  # of larger files only size, beginning and end are hashed
_END_BYTES = 1 << 20


def model_digest(folder: Path, adapter: Path | None = None) -> str:
    """A short digest of weights, config and tokenizer: engines with equal digests can exchange KV.

    adapter: the folder of a LoRA adapter of the model.
    """
    total = hashlib.sha256()
    for path in (*_files(folder), *(_files(adapter) if adapter is not None else ())):
        total.update(path.name.encode())
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= FULL_HASH_BYTES:
                total.update(file.read())
            else:
                total.update(f"{size}".encode() + file.read(_END_BYTES))
                file.seek(-_END_BYTES, 2)
                total.update(file.read())
    return total.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json") and "card" not in p.name)
