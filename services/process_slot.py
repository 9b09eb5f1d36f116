"""Which of the processes of one service this process is. No I/O."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessSlot:
    """One of `count` processes that serve as one, at the same ports.

    group_id: the service's name in the mesh. index: from 0. folder: where the processes have their Unix sockets; nobody else
        may enter it. metrics_address: where the metrics of all of them are.
    """

    group_id: str
    index: int
    count: int
    folder: str
    metrics_address: str

    def name_of(self, index: int) -> str:
        """The instance id of the process with this index: the same after a restart."""
        return f"{self.group_id}.{index}"

    def socket(self, index: int) -> str:
        """The address, for gRPC, at which the process with this index answers the others."""
        return f"unix:{self.folder}/{index}.sock"

    @property
    def instance_id(self) -> str:
        """This process's own."""
        return self.name_of(self.index)

    @property
    def heartbeat_file(self) -> Path:
        """The file that this process touches while its event loop runs."""
        return Path(self.folder) / f"{self.index}.alive"

    def others(self) -> list[int]:
        """The other processes' indices."""
        return [index for index in range(self.count) if index != self.index]

    def to_json(self) -> str:
        """One line, for a command line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ProcessSlot":
        """The slot that `to_json` wrote.

        Raises:
            ValueError: `text` is none.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a process slot: {error}") from None
