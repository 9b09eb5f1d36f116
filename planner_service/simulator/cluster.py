"""A cluster of instances in virtual time, whose requests may move between equal ones. No I/O.

Each instance is the worker's batch scheduler (`instance_kernel`). A `Policy` (`policies`, `staged`) decides where requests go
and when they move on; `loop` runs both.

A live move: the source keeps decoding while KV is sent; at the first tick at which all of it could be there the sequence
changes over between two of the source's steps. The receiver sets KV aside from the start; where what has been generated
meanwhile does not fit, or the request has ended, nothing moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.planner_service.simulator import instance_kernel as kernel
from penstock.planner_service.simulator.batch_step import COMING, FREE, RUNNING, WAITING, new_requests
from penstock.planner_service.simulator.tier import Replica
from penstock.planner_service.simulator.workload import Floats, Ints, Workload
from penstock.services.domain.errors import invalid
from penstock.services.domain.stages.qoe import InFlight
from penstock.services.domain.stages.worth import ROUND_TRIP_S, move_s


@dataclass(frozen=True, slots=True)
class Moves:
    """What a move takes, and how often things are looked at.

    kv_bytes_per_token: over all layers. bandwidth_bytes_per_s: between two instances. mixed: by how much attention over
    decodes takes longer at worst for unlike lengths (1.1: 2.1 times as long); it grows with one less mean over longest
    length.
    """

    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    mixed: float = 0.0
    tick_s: float = 0.05
    publish_s: float = 0.2
    refine_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.kv_bytes_per_token < np.inf:
            raise invalid("kv_bytes_per_token", "must be a finite number, not negative")
        if not self.bandwidth_bytes_per_s > 0:
            raise invalid("bandwidth_bytes_per_second", "must be positive")

    @property
    def token_s(self) -> float:
        """Of a token's KV on the way."""
        return self.kv_bytes_per_token / self.bandwidth_bytes_per_s

    def transfer_s(self, tokens: int) -> float:
        return move_s(tokens, self.kv_bytes_per_token, self.bandwidth_bytes_per_s)


@dataclass(slots=True)
class Transfer:
    """A request's KV on its way. reserved: blocks set aside at the target."""

    request: int
    source: int
    target: int
    ends_s: float
    reserved: int


@dataclass
class Cluster:
    """The state that policies see and change. Instances are numbered from 0. replicas: what each of them is.

    first_s, finish_s (N): when each request got its first and its last token, 0 for what has not come. length (N): tokens of
    prompt and output so far. home (N): the instance of each, -1 before it has one.
    """

    work: Workload
    replicas: Sequence[Replica]
    moves: Moves
    now_s: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    moved: int = 0

    def __post_init__(self) -> None:
        n, e = len(self.work), self.instances
        room = min(replica.request_tokens for replica in self.replicas)
        if self.work.longest_tokens > room:
            raise invalid("workload", f"a request has {self.work.longest_tokens} tokens, KV {room}")
        self._all = kernel.new_instances(e, n)
        self._all.batch.counts[:, FREE] = [replica.lane_blocks for replica in self.replicas]
        self.parts = [kernel.one_of(self._all, i) for i in range(e)]
        alike = dict[Replica, list[int]]()
        for i, replica in enumerate(self.replicas):
            alike.setdefault(replica, []).append(i)
        self._engines = [(np.array(which), replica.engine(mixed=self.moves.mixed)) for replica, which in alike.items()]
        self.first_s, self.finish_s = np.zeros(n), np.zeros(n)
        self._requests = new_requests(self.work.arrivals, np.zeros(n, np.int64), self.first_s, self.finish_s)
        self.length, self.computed, self.blocks = self._requests.length, self._requests.computed, self._requests.blocks
        self.home, self._ended = np.full(n, -1, np.int64), np.zeros(n, np.int64)

    @property
    def instances(self) -> int:
        return len(self.replicas)

    @property
    def replica(self) -> Replica:
        """What each instance is, where all are equal."""
        return self.replicas[0]

    @property
    def counters(self) -> Floats:
        """(E, COUNTERS) what each instance has done."""
        return self._all.counters

    def send(self, request: int, instance: int, at_s: float) -> None:
        """A new request goes to an instance."""
        self.home[request] = instance
        kernel.put_in(self.parts[instance], request, at_s)

    def row(self, instance: int, which: int) -> Ints:
        """The requests of one row of an instance's batch."""
        batch = self.parts[instance].batch
        return batch.rows[which, : batch.counts[which]]

    def running(self, instance: int) -> Ints:
        return self.row(instance, RUNNING)

    def busy(self) -> list[int]:
        """Instances that have running requests."""
        return np.flatnonzero(self._all.batch.counts[:, RUNNING]).tolist()

    def waiting(self, instance: int) -> Ints:
        """Requests there that hold no KV yet, those about to arrive included."""
        return np.concatenate([self.row(instance, WAITING), self.row(instance, COMING)])

    def decoding(self, instance: int) -> Ints:
        """Running requests that have begun to answer: those that may move."""
        running = self.running(instance)
        return running[self.length[running] > self.work.input_tokens[running]]

    def pending_work(self) -> Ints:
        """(E, 3): of every instance the prompt tokens to compute, the requests and their tokens."""
        return kernel.pending_work(self._all, self._requests)

    def held(self, instance: int) -> list[InFlight]:
        requests = np.concatenate([self.running(instance), self.waiting(instance)])
        lengths, inputs = self.length[requests].tolist(), self.work.input_tokens[requests].tolist()
        return [InFlight(*pair) for pair in zip(lengths, inputs, strict=True)]

    def free_tokens(self, instance: int) -> int:
        return int(self.parts[instance].batch.counts[FREE]) * self.replica.limits.block_tokens

    def start_move(self, request: int, source: int, target: int) -> None:
        """Set KV aside at the target and send."""
        tokens = int(self.length[request])
        reserved = -(-tokens // self.replica.limits.block_tokens)
        self.parts[target].batch.counts[FREE] -= reserved
        self.transfers.append(Transfer(request, source, target, self.now_s + self.moves.transfer_s(tokens), reserved))

    def advance(self, until_s: float) -> list[int]:
        """Let every instance run until then; the requests that ended."""
        ended = list[int]()
        for alike, engine in self._engines:
            count = kernel.advance_all(
                until_s, self._all, alike, engine, self.work.priority, self._requests, self._ended
            )
            ended += self._ended[:count].tolist()
        self.now_s = until_s
        return ended

    def complete_moves(self) -> list[tuple[Transfer, bool]]:
        """Those whose KV is there by now, and whether the request changed over."""
        done = [t for t in self.transfers if t.ends_s <= self.now_s]
        self.transfers = [t for t in self.transfers if t.ends_s > self.now_s]
        return [(t, self._change_over(t)) for t in done]

    def _change_over(self, t: Transfer) -> bool:
        r, source, target = t.request, self.parts[t.source], self.parts[t.target].batch.counts
        target[FREE] += t.reserved
        needed = -(-int(self.computed[r]) // self.replica.limits.block_tokens)
        runs = r in self.running(t.source) and self.length[r] > self.work.input_tokens[r]
        if not runs or needed > target[FREE] or target[RUNNING] >= self.replica.limits.max_running:
            return False
        kernel.remove(source, self._requests, r)
        self.blocks[r] = needed
        target[FREE] -= needed
        at_s = max(self.now_s, float(source.ready_s[0])) + ROUND_TRIP_S
        kernel.put_in(self.parts[t.target], r, at_s)
        self.home[r] = t.target
        self.moved += 1
        return True
