"""The place of one process among the processes of its service. No I/O."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.services.field_problems import from_json


@dataclass(frozen=True, slots=True)
class ProcessSlot:
    """One of `count` processes that serve as one, at the same ports.

    group_id: the service's name in the mesh. index: from 0. folder: for the processes' Unix sockets and heartbeat files; no
        other user may access it. metrics_address: address of the page with the metrics of all processes.
    """

    group_id: str
    index: int
    count: int
    folder: str
    metrics_address: str

    def name_of(self, index: int) -> str:
        """The instance id of the process with this index; it stays the same after a restart."""
        return f"{self.group_id}.{index}"

    def socket(self, index: int) -> str:
        """The gRPC address at which the process with this index responds to the others."""
        return f"unix:{self.folder}/{index}.sock"

    @property
    def instance_id(self) -> str:
        """The instance id of this process."""
        return self.name_of(self.index)

    @property
    def heartbeat_file(self) -> Path:
        """The file that this process touches while its event loop runs."""
        return Path(self.folder) / f"{self.index}.alive"

    def others(self) -> list[int]:
        """The other processes' indices."""
        return [index for index in range(self.count) if index != self.index]

    def to_json(self) -> str:
        """One line of JSON, for a command line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ProcessSlot":
        """Parse what `to_json` returned.

        Raises:
            ValueError: `text` is not a slot.
        """
        return from_json(cls, text)
