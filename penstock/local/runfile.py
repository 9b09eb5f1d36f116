"""What `penstock up` leaves for the other commands to find it by."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "run.json"


@dataclass(frozen=True, slots=True)
class RunFile:
    """A running local mesh. pid: of `penstock up`. grpc, http: the routers' addresses."""

    pid: int
    mesh_file: str
    redis_url: str
    grpc: tuple[str, ...]
    http: tuple[str, ...]
    planner: str

    def write(self, folder: Path) -> None:
        path = folder / NAME
        path.with_suffix(".tmp").write_text(json.dumps(asdict(self), indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)


def read_run_file(folder: Path) -> RunFile | None:
    """The mesh that runs from `folder`; None if none does."""
    try:
        data = json.loads((folder / NAME).read_text())
        found = RunFile(
            data["pid"], data["mesh_file"], data["redis_url"], tuple(data["grpc"]), tuple(data["http"]), data["planner"]
        )
        os.kill(found.pid, 0)
    except (OSError, ValueError, KeyError):
        return None
    return found


def remove(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)
