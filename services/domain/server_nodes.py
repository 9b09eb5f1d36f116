"""Servers over several nodes: how their GPUs are divided, and which part a process is. No I/O."""

import re
from dataclasses import dataclass
from typing import Self

from penstock.services.domain.hardware import ReplicaShape

_NAME = re.compile(r"(?P<rank>\d{1,4})/(?P<count>\d{1,4})@(?P<address>\S+:\d{1,5})")


@dataclass(frozen=True, slots=True)
class ServerNode:
    """One node of a server over `count` nodes. rank: from 0; rank 0 takes the requests. address: `host:port`, where rank 0
    awaits the others."""

    rank: int
    count: int
    address: str

    @classmethod
    def named(cls, name: str) -> Self:
        """The node of a name.

        Raises:
            ValueError: It is none.
        """
        match = _NAME.fullmatch(name)
        if match is None or not int(match["rank"]) < int(match["count"]):
            raise ValueError(f"must be like 1/2@10.0.0.7:20000, RANK/COUNT@HOST:PORT, not '{name}'")
        return cls(int(match["rank"]), int(match["count"]), match["address"])

    def __str__(self) -> str:
        return f"{self.rank}/{self.count}@{self.address}"


def node_counts(shape: ReplicaShape) -> tuple[int, ...]:
    """The numbers of nodes that can have equal parts of a replica, ascending: equal numbers of whole stages, or of a stage's
    shards."""
    tp, pp = shape.tp, shape.pp
    return tuple(n for n in range(1, shape.gpus + 1) if pp % n == 0 or (n % pp == 0 and tp % (n // pp) == 0))
