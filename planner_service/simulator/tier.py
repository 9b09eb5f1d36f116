"""One tier in virtual time: replicas of any shapes, requests dispatched to them, what each request then felt. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.planner_service.simulator import kernel
from penstock.planner_service.simulator.batch_step import (
    BUSY_S,
    COUNTERS,
    DECODE_FIRST,
    LATENCY,
    PREEMPTIONS,
    STEPS,
    Engine,
    Lateness,
    Outcome,
)
from penstock.planner_service.simulator.felt import Measured
from penstock.planner_service.simulator.workload import Floats, Ints, Workload
from penstock.services.domain.errors import invalid
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.types.planning import Dispatch
from penstock.types.planning import EngineBatch as EngineLimits

__all__ = ["Dispatch", "EngineLimits", "Replica", "Served", "serve"]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's step time and memory. kv_tokens: over the whole replica; each of its pp lanes has an equal part.

    With data-parallel attention, the parts of a lane are simulated as one, as if requests of all lengths filled them evenly.
    """

    shape: ReplicaShape
    latency: StepLatencyModel
    kv_tokens: int
    limits: EngineLimits = field(default_factory=EngineLimits)

    @property
    def lane_blocks(self) -> int:
        return self.kv_tokens // self.shape.pp // self.limits.block_tokens

    @property
    def lane_tokens(self) -> int:
        """The KV of a lane, in whole blocks."""
        return self.lane_blocks * self.limits.block_tokens

    @property
    def request_tokens(self) -> int:
        """The longest request that a lane can hold, in whole blocks: with data-parallel attention, on one group of GPUs."""
        return self.lane_blocks // self.shape.attn_dp * self.limits.block_tokens

    def engine(self, policy: int = DECODE_FIRST, mixed: float = 0.0) -> Engine:
        """As compiled code reads it. policy: of batches, see batch_step. mixed: see cluster.Moves."""
        limits, latency, cpu = self.limits, self.latency, self.latency.cpu
        batches = (limits.block_tokens, limits.max_running, limits.max_step_tokens, policy)
        rates = (float(latency.context_token_s), float(latency.pair_s), float(latency.gap_s), float(mixed))
        cpu_rates = (float(cpu.step_s), float(cpu.request_s), float(cpu.prompt_s))
        knots = (np.array(latency.knot_tokens, np.float64), np.array(latency.knot_s, np.float64))
        return Engine(self.shape.pp, self.lane_blocks, *batches, cpu.overlapped, *rates, *cpu_rates, *knots)

    def capacity_per_s(
        self,
        input_tokens: float,
        output_tokens: float,
        cached_tokens: float = 0.0,
        window: int = 0,
        acceptance: float = 0.0,
    ) -> float:
        """Requests per second, all lanes full of requests of one length: the steady state of prompts mixed with decodes.

        cached_tokens: of the prompt, those that are not computed; their KV takes its room all the same. window: tokens of a
        draft that cost nothing to have, such as a rejected answer, which each pass verifies; each is accepted with
        probability `acceptance` if those before it are.
        """
        limits = self.limits
        passes = output_tokens / sum(acceptance**place for place in range(window + 1))
        batch = min(limits.max_running, max(1.0, self.lane_tokens / (input_tokens + output_tokens)))
        per_request = input_tokens - cached_tokens + passes * (1 + window)  # tokens computed
        batch = min(batch, limits.max_step_tokens * passes / per_request)
        tokens = batch * per_request / passes
        context = batch * (input_tokens + output_tokens / 2)
        pairs = batch / passes * (input_tokens**2 - cached_tokens**2) / 2 + window * context
        load = StepLoad(max(1, round(tokens)), round(context), pairs, requests=batch, prompts=batch / passes)
        step_s = self.latency.step_s(load)
        return batch / passes / (step_s / self.shape.pp)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What N requests felt: seconds at which the first and last token came; and what the replicas did.

    busy_share: of the time from the first arrival to the last token, the mean over replicas of being at work.
    """

    first_s: Floats
    finish_s: Floats
    replica: Ints
    busy_share: float
    steps: int
    preemptions: int


def assign(priority: Ints, kind: Ints, capacity: Floats, dispatch: Dispatch) -> Ints:
    """(N) the replica of each of N requests. kind: (R) of each replica; capacity: (K) requests per second of each kind.

    priority (N): those of one priority take turns by themselves. Else, where grading requests and others alternate, all of
    one sort could go to one replica.
    """
    if (priority == priority[:1]).all():
        return _turns(len(priority), kind, capacity, dispatch)
    owner = np.empty(len(priority), np.int64)
    for one in np.unique(priority):
        chosen = priority == one
        owner[chosen] = _turns(int(chosen.sum()), kind, capacity, dispatch)
    return owner


def _turns(count: int, kind: Ints, capacity: Floats, dispatch: Dispatch) -> Ints:
    """(count) the replicas in their turns."""
    replicas = len(kind)
    if dispatch is Dispatch.ROUND_ROBIN or (kind == kind[0]).all():
        return np.arange(count, dtype=np.int64) % replicas
    share = capacity[kind]
    owner = np.empty(count, np.int64)
    kernel.take_turns(share / share.sum(), owner)
    return owner


def serve(work: Workload, replicas: Sequence[Replica], dispatch: Dispatch = Dispatch.CAPACITY) -> Served:
    """Simulate, with requests in turns. Deterministic.

    Raises:
        InvalidRequest: requests but no replica, or a request longer than a lane's KV.
    """
    if not len(work):
        return Served(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), 0.0, 0, 0)
    if not replicas:
        raise invalid("replicas", "at least one is needed")
    kinds = list(dict.fromkeys(replicas))
    number = {kind: i for i, kind in enumerate(kinds)}
    capacity = np.array([kind.capacity_per_s(*work.mean_tokens) for kind in kinds])
    kind = np.array([number[replica] for replica in replicas], np.int64)
    return serve_kinds(work, KindTable(kinds), kind, capacity, dispatch)


def serve_kinds(work: Workload, table: "KindTable", kind: Ints, capacity: Floats, dispatch: Dispatch) -> Served:
    """serve(), with replicas given as (R) indices into a table of kinds: for callers that simulate often."""
    owner = assign(work.priority, kind, capacity, dispatch)
    _check_room(work, owner, kind, table)
    first, finish, counters = np.zeros(len(work)), np.zeros(len(work)), np.zeros(COUNTERS)
    never_late = Lateness(np.full(len(work), np.inf), len(work), LATENCY)
    kernel.simulate_tier(work.arrivals, table.tier(owner, kind), never_late, Outcome(first, finish, counters))
    span = float(finish.max() - work.arrival_s[0])
    busy = float(counters[BUSY_S]) / (span * len(kind)) if span > 0 else 0.0
    return Served(first, finish, owner, busy, int(counters[STEPS]), int(counters[PREEMPTIONS]))


class KindTable:
    """Kinds of replica as the kernel reads them; see kernel.Tier."""

    def __init__(self, kinds: Sequence[Replica]) -> None:
        self.kinds = list(kinds)
        engines = [kind.engine() for kind in kinds]
        self._whole = np.array([engine[:7] for engine in engines], np.int64).reshape(-1, 7)
        self._rates = np.array([engine[7:14] for engine in engines], np.float64).reshape(-1, 7)
        self.room = np.array([kind.request_tokens for kind in kinds], np.int64)
        width = max((len(engine.knot_s) for engine in engines), default=2)
        self._knots = np.empty((2, len(engines), width))
        for row, engine in enumerate(engines):
            x, y = engine.knot_tokens, engine.knot_s
            more = np.arange(1, width - len(x) + 1)  # the last piece continues
            self._knots[:, row] = [*x, *(x[-1] + more)], [*y, *(y[-1] + more * ((y[-1] - y[-2]) / (x[-1] - x[-2])))]

    def tier(self, owner: Ints, kind: Ints) -> kernel.Tier:
        """The tier of these replicas. owner (N): of each request; kind (R): of each replica."""
        return kernel.Tier(owner, kind, self._whole, self._rates, *self._knots)


def _check_room(work: Workload, owner: Ints, kind: Ints, table: KindTable) -> None:
    tokens = work.input_tokens + work.output_tokens
    too_long = np.flatnonzero(tokens > table.room[kind][owner])
    if len(too_long):
        r = int(too_long[0])
        k = int(kind[owner[r]])
        problem = f"a request has {tokens[r]} tokens, but {table.kinds[k].shape} has KV for {table.room[k]}"
        raise invalid("replicas", problem)


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """What N requests felt at a tier, in seconds since they came there. first_s (N): first token; finish_s (N): last."""

    first_s: Floats
    finish_s: Floats

    @property
    def written_s(self) -> Floats:
        """(N) from the first token to the last."""
        return self.finish_s - self.first_s

    def measured(self, what: Measured, output_tokens: Ints) -> Floats:
        """(N) what is measured; the pace of an answer of one token is 0."""
        match what:
            case Measured.FIRST_TOKEN:
                return self.first_s
            case Measured.PACE:
                return np.asarray(self.written_s / np.maximum(1, output_tokens - 1))
        return self.finish_s


def alone_times(work: Workload, replica: Replica) -> Times:
    """The times of each request if it had the replica for itself: what no dispatch can beat."""
    first, finish = np.zeros(len(work)), np.zeros(len(work))
    kernel.alone_s(work.arrivals, replica.engine(), first, finish)
    return Times(first, finish)
