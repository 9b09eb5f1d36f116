"""Instances of services and their load, as they tell the mesh about themselves. No I/O."""

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    WORKER = "worker"
    JUDGE = "judge"
    PLANNER = "planner"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a worker serves.

    max_requests: running and queued requests it takes at once; one more is refused.
    """

    tier: str
    model: str
    digest: str
    engine: str
    max_context_tokens: int
    kv_blocks: int
    kv_block_tokens: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's load. Lengths are tokens per request, prompt and output so far.

    cached_tokens: of ended requests, in KV that a new one with the same beginning need not compute.
    """

    running_tokens: tuple[int, ...] = ()
    queued_tokens: tuple[int, ...] = ()
    free_kv_blocks: int = 0
    output_tokens_per_s: float = 0.0
    cached_tokens: int = 0

    @property
    def requests(self) -> int:
        return len(self.running_tokens) + len(self.queued_tokens)

    @property
    def tokens(self) -> int:
        return sum(self.running_tokens) + sum(self.queued_tokens)


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """What an instance publishes about itself.

    epoch, sequence: a record replaces an earlier one of the same instance where (epoch, sequence) is greater; the epoch
        changes with every start of the process.
    lease_s: without a later record the instance counts as gone after so many seconds.
    """

    instance_id: str
    role: Role
    address: str
    epoch: float
    sequence: int
    lease_s: float
    draining: bool = False
    metrics_address: str = ""
    http_address: str = ""
    model: ModelCard | None = None
    load: Load | None = None

    @property
    def version(self) -> tuple[float, int]:
        return self.epoch, self.sequence
