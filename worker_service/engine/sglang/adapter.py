"""LoRA adapters that a server was started with. Reads folders, nothing else."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.worker_service.engine.digest import model_digest
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.sglang.adapter_folder import CONFIG


@dataclass(frozen=True, slots=True)
class ServerAdapter:
    """An adapter that a server was started with. name: requests name it so. path: its folder on the server's machine."""

    name: str
    path: str


def server_adapters(data: dict[str, Any]) -> tuple[ServerAdapter, ...]:
    """The adapters in a response of `/server_info`."""
    entries = data.get("lora_paths") or ()
    return tuple(ServerAdapter(entry["lora_name"], entry["lora_path"]) for entry in entries)


def name_at_server(adapters: Seq[ServerAdapter], folder: Path) -> str:
    """The server's name of the adapter in `folder`: one of the same files, else one of the folder's name elsewhere.

    Raises:
        EngineUnusable: The server has no such adapter.
    """
    digest = model_digest(folder)
    for adapter in adapters:
        path = Path(adapter.path)
        if path.resolve() == folder.resolve() or ((path / CONFIG).is_file() and model_digest(path) == digest):
            return adapter.name
    for adapter in adapters:
        if adapter.name == folder.name and not (Path(adapter.path) / CONFIG).is_file():
            return adapter.name
    known = ", ".join(adapter.name for adapter in adapters) or "none"
    raise EngineUnusable(
        f"lora_paths: the server does not have the adapter {folder} (its adapters: {known}); "
        f"start it with --enable-lora --lora-paths {folder.name}={folder}"
    )
