"""Whether a worker can use a running server: version, kind, model, tokenizer and adapter. Reads folders, nothing else.

A worker that attached to a server of another model would take its tokens for those of its own.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.worker_service.engine.digest import model_digest
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.sglang.adapter_folder import CONFIG

OLDEST, TOO_NEW = (0, 5, 20), (0, 6)
"""The versions whose API the client knows: from OLDEST, and before TOO_NEW."""


def problems(server: Mapping[str, Any], folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Why a worker of the model in `folder` cannot use this server; nothing if it can.

    server: its response at `/server_info`. names: under which the tier knows the model: its id at the hub, its name in the
    API. A server has the tier's model if its path is the folder or holds the same files, or if its path or name is one of
    `names`.
    """
    version, model, tokenizer, served_name, mode = (
        str(server.get(name) or "")
        for name in ("version", "model_path", "tokenizer_path", "served_model_name", "disaggregation_mode")
    )
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", version)[:3])) < TOO_NEW:
        known = f"{_dotted(OLDEST)} or later, before {_dotted(TOO_NEW)}"
        yield f"version: the server is SGLang {version or 'of an unknown version'}; supported: {known}"
    if server.get("is_embedding"):
        yield "is_embedding: the server computes embeddings, not replies"
    if mode not in ("", "null"):
        yield f"disaggregation_mode: the server does '{mode}' only: attach to one that does both"
    own_names = {name for name in names if name}
    if served_name not in own_names and not _same(model, folder, own_names):
        yield (
            f"model_path: the server has {model or 'an unknown model'}, not {folder}; if they are the same, "
            f"start it with --served-model-name {names[-1]}"
        )
    elif tokenizer not in ("", model) and not _same(tokenizer, folder, own_names):
        yield f"tokenizer_path: the server has the tokenizer of {tokenizer}, not of {folder}"


def adapter_name(adapters: Mapping[str, str], folder: Path) -> str:
    """The server's name of the adapter in `folder`: one of the same files, else one of the folder's name elsewhere.

    adapters: their folders on the server's machine, by the names that requests give.

    Raises:
        EngineUnusable: The server has no such adapter.
    """
    digest = model_digest(folder)
    for name, path in adapters.items():
        other = Path(path)
        if other.resolve() == folder.resolve() or ((other / CONFIG).is_file() and model_digest(other) == digest):
            return name
    if folder.name in adapters and not (Path(adapters[folder.name]) / CONFIG).is_file():
        return folder.name
    raise EngineUnusable(
        f"lora_paths: the server does not have the adapter {folder} (its adapters: {', '.join(adapters) or 'none'}); "
        f"start it with --enable-lora --lora-paths {folder.name}={folder}"
    )


def _same(path: str, folder: Path, names: set[str]) -> bool:
    if path in names:
        return True
    other = Path(path)
    if not path or not (other / "config.json").exists():
        return False
    return other.resolve() == folder.resolve() or model_digest(other) == model_digest(folder)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
