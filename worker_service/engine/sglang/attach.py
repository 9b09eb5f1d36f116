"""Whether a worker can use a running server: version, kind, model and tokenizer. Reads model folders, nothing else.

A worker that attached to a server of another model would take its tokens for those of its own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.worker_service.engine.digest import model_digest

OLDEST, TOO_NEW = (0, 5, 20), (0, 6)
"""The versions whose API the client knows: from OLDEST, and before TOO_NEW."""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What `/server_info` says of a server. Empty: it does not say."""

    version: str = ""
    model_path: str = ""
    tokenizer_path: str = ""
    served_name: str = ""
    disaggregation: str = ""
    embeds: bool = False

    @classmethod
    def from_info(cls, data: dict[str, Any]) -> "ServerIdentity":
        mode = str(data.get("disaggregation_mode") or "")
        return cls(
            version=str(data.get("version") or ""),
            model_path=str(data.get("model_path") or ""),
            tokenizer_path=str(data.get("tokenizer_path") or ""),
            served_name=str(data.get("served_model_name") or ""),
            disaggregation="" if mode == "null" else mode,
            embeds=bool(data.get("is_embedding")),
        )


def problems(server: ServerIdentity, folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Why a worker of the model in `folder` cannot use this server; nothing if it can.

    names: under which the tier knows the model: its id at the hub, its name in the API. A server has the tier's model if its
    path is the folder or holds the same files, or if its path or name is one of `names`.
    """
    if not OLDEST <= _numbers(server.version) < TOO_NEW:
        known = f"{_dotted(OLDEST)} or later, before {_dotted(TOO_NEW)}"
        yield f"version: the server is SGLang {server.version or 'of an unknown version'}; supported: {known}"
    if server.embeds:
        yield "is_embedding: the server computes embeddings, not replies"
    if server.disaggregation:
        yield f"disaggregation_mode: the server does '{server.disaggregation}' only: attach to one that does both"
    own_names = {name for name in names if name}
    if server.served_name not in own_names and not _same(server.model_path, folder, own_names):
        yield (
            f"model_path: the server has {server.model_path or 'an unknown model'}, not {folder}; if they are the same, "
            f"start it with --served-model-name {names[-1]}"
        )
    elif server.tokenizer_path not in ("", server.model_path) and not _same(server.tokenizer_path, folder, own_names):
        yield f"tokenizer_path: the server has the tokenizer of {server.tokenizer_path}, not of {folder}"


def _same(path: str, folder: Path, names: set[str]) -> bool:
    if path in names:
        return True
    other = Path(path)
    if not path or not (other / "config.json").exists():
        return False
    return other.resolve() == folder.resolve() or model_digest(other) == model_digest(folder)


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version; none for what is no version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in match.groups()) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
