"""Identifies a model by a digest of its files."""

import hashlib
from pathlib import Path

FULL_HASH_BYTES = 64 * 1024 * 1024  # of larger files only size, beginning and end are hashed
_END_BYTES = 1 << 20


def model_digest(folder: Path, adapter: Path | None = None, *, form: str = "") -> str:
    """A short digest of weights, config and tokenizer: engines with equal digests can exchange KV.

    folder: of the model, or its GGUF file. adapter: the folder of a LoRA adapter of the model. form: of the KV, where that is
    not the model's alone.
    """
    total = hashlib.sha256(form.encode())
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
    if folder.is_file():
        return [folder]
    return sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json") and "card" not in p.name)
