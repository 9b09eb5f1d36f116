"""A cluster of equal instances in virtual time, whose requests may move between them. No I/O.

Each instance is the worker's batch scheduler (`instance_kernel`). Where requests go, and when they move on, is decided by the
very code that serves: `services.domain.stages`. Between two ticks the instances run by themselves; at a tick they publish
what they hold, boundaries are refined, and moves are asked for, bid for, started and completed. So placement knows the load
of the last tick and what was sent since, as in the mesh.

A live move: the source goes on decoding while KV is sent; at the first tick at which all of it could be there the sequence
changes over between two of the source's steps. The receiver sets KV aside from the start; where what has been generated
meanwhile does not fit, or the request has ended, nothing moves.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner_service.simulator import instance_kernel as kernel
from planner_service.simulator.tier import Replica
from planner_service.simulator.workload import Floats, Ints, Workload
from services.domain.errors import invalid
from services.domain.stages import InFlight, QoeModel, StageLayout
from services.domain.stages.bidding import Ask, Bid, Go, Receiver, Sender, TransferSlots, choose
from services.domain.stages.overload import excess_tokens, to_hand_over
from services.domain.stages.places import StagePlace, by_preference, occupancy, outgrown_to, peers, successors
from services.domain.stages.refinement import RefineBy, averaged, refine

ROUND_TRIP_S = 0.001  # of a message between instances; a move's last round waits for one


@dataclass(frozen=True, slots=True)
class Moves:
    """What a move takes, and how often things are looked at.

    kv_bytes_per_token over bandwidth_bytes_per_s is a token's time on the way. mixed: by how much attention over decodes
    takes longer at worst for unlike lengths (1.1: 2.1 times as long); it grows with one less mean over longest length.
    """

    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    mixed: float
    tick_s: float = 0.05
    publish_s: float = 0.2
    refine_s: float = 5.0

    def transfer_s(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / self.bandwidth_bytes_per_s + ROUND_TRIP_S


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
    """The state that policies see and change. Instances are numbered from 0."""

    work: Workload
    replica: Replica
    moves: Moves
    instances: int
    now_s: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    moved: int = 0
    moved_tokens: int = 0
    failed_moves: int = 0
    produced: Ints = field(init=False)
    home: Ints = field(init=False)

    def __post_init__(self) -> None:
        n, e, limits = len(self.work), self.instances, self.replica.limits
        room = self.replica.lane_blocks
        if self.work.longest_tokens > self.replica.lane_tokens:
            raise invalid("workload", f"a request has {self.work.longest_tokens} tokens, KV {self.replica.lane_tokens}")
        self.counts = np.zeros((e, kernel.COUNTS), np.int64)
        self.counts[:, kernel.FREE] = room
        self._running, self._waiting, self._coming = (np.zeros((e, n), np.int64) for _ in range(3))
        self._coming_s, self._ready_s = np.zeros((e, n)), np.zeros((e, 1))
        self._limits = np.array([limits.block_tokens, limits.max_running, limits.max_step_tokens], np.int64)
        latency = self.replica.latency
        self._rates = np.array([latency.context_token_s, latency.pair_s, self.moves.mixed])
        self._kx, self._ky = np.array(latency.knot_tokens), np.array(latency.knot_s)
        self.length = self.work.input_tokens.copy()
        self.computed, self.blocks, self._chunk, self._rank = (np.zeros(n, np.int64) for _ in range(4))
        self.first_s, self.finish_s = np.zeros(n), np.zeros(n)
        self._ended = np.zeros(n, np.int64)
        self.produced, self.home = np.zeros(e, np.int64), np.full(n, -1, np.int64)

    def send(self, request: int, instance: int, at_s: float) -> None:
        """A new request goes to an instance."""
        self.home[request] = instance
        kernel.put_in(self.counts[instance], self._coming[instance], self._coming_s[instance], request, at_s)

    def running(self, instance: int) -> Ints:
        return self._running[instance, : self.counts[instance, kernel.RUNNING]]

    def waiting(self, instance: int) -> Ints:
        """Requests there that hold no KV yet, those about to arrive included."""
        rows, counts = self._waiting[instance], self.counts[instance]
        return np.concatenate([rows[: counts[kernel.WAITING]], self._coming[instance, : counts[kernel.COMING]]])

    def decoding(self, instance: int) -> Ints:
        """Running requests that have begun to answer: those that may move."""
        running = self.running(instance)
        return running[self.length[running] > self.work.input_tokens[running]]

    def held(self, instance: int) -> list[InFlight]:
        requests = np.concatenate([self.running(instance), self.waiting(instance)])
        lengths, inputs = self.length[requests].tolist(), self.work.input_tokens[requests].tolist()
        return [InFlight(*pair) for pair in zip(lengths, inputs, strict=True)]

    def free_tokens(self, instance: int) -> int:
        return int(self.counts[instance, kernel.FREE]) * self.replica.limits.block_tokens

    def start_move(self, request: int, source: int, target: int) -> None:
        """Set KV aside at the target and send."""
        tokens = int(self.length[request])
        reserved = -(-tokens // self.replica.limits.block_tokens)
        self.counts[target, kernel.FREE] -= reserved
        self.transfers.append(Transfer(request, source, target, self.now_s + self.moves.transfer_s(tokens), reserved))

    def advance(self, until_s: float) -> list[int]:
        """Let every instance run until then; the requests that ended."""
        ended = list[int]()
        for i in range(self.instances):
            count = kernel.advance(
                until_s,
                self.counts[i],
                self._running[i],
                self._waiting[i],
                self._coming[i],
                self._coming_s[i],
                self._ready_s[i],
                self._limits,
                self._rates,
                self._kx,
                self._ky,
                self.work.input_tokens,
                self.work.output_tokens,
                self.length,
                self.computed,
                self.blocks,
                self._chunk,
                self._rank,
                self.first_s,
                self.finish_s,
                self._ended,
            )
            found = self._ended[:count]
            ended += found.tolist()
            self.produced[i] += self.work.output_tokens[found].sum()
        self.now_s = until_s
        return ended

    def complete_moves(self) -> list[tuple[Transfer, bool]]:
        """Those whose KV is there by now, and whether the request changed over."""
        done = [t for t in self.transfers if t.ends_s <= self.now_s]
        self.transfers = [t for t in self.transfers if t.ends_s > self.now_s]
        return [(t, self._change_over(t)) for t in done]

    def _change_over(self, t: Transfer) -> bool:
        r, target = t.request, self.counts[t.target]
        target[kernel.FREE] += t.reserved
        needed = -(-int(self.computed[r]) // self.replica.limits.block_tokens)
        runs = r in self.running(t.source) and self.length[r] > self.work.input_tokens[r]
        if not runs or needed > target[kernel.FREE] or target[kernel.RUNNING] >= self.replica.limits.max_running:
            self.failed_moves += 1
            return False
        kernel.take_out(self.counts[t.source], self._running[t.source], r)
        self.counts[t.source, kernel.FREE] += self.blocks[r]
        self.blocks[r] = needed
        target[kernel.FREE] -= needed
        at_s = max(self.now_s, float(self._ready_s[t.source, 0])) + ROUND_TRIP_S
        kernel.put_in(target, self._coming[t.target], self._coming_s[t.target], r, at_s)
        self.home[r] = t.target
        self.moved += 1
        self.moved_tokens += int(self.length[r])
        return True


class Policy:
    """Where requests go and what moves. `publish` comes every publish_s, `tick` every tick_s."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def place(self, request: int) -> int:
        """The instance of a request that has just arrived."""
        raise NotImplementedError

    def publish(self) -> None:
        """Instances tell each other what they hold."""

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        """After all instances have run up to now."""

    def boundaries(self) -> list[float]:
        """Where stages end, averaged over their instances, but for the last."""
        return []


class RoundRobin(Policy):
    """In turn, whatever is there; nothing moves."""

    def place(self, request: int) -> int:
        return request % self.cluster.instances


class MemoryAware(Policy):
    """Dispatch and migration by free memory, after Llumnix (Sun et al., OSDI 2024), with its load metric: freeness.

    An instance's freeness is its free KV less what its queue will need, per running request: the steps for which it can go
    on. New requests go where it is greatest. At each publication the instances below `low` are paired with the freest above
    `high`, the least free with the most, and hand over a running request, the shortest first.
    """

    low, high = 100.0, 400.0

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._free = np.full(cluster.instances, float(cluster.replica.lane_tokens))
        self._batch = np.zeros(cluster.instances)
        self._moving: set[int] = set()

    def place(self, request: int) -> int:
        best = int(np.argmax(self._freeness()))
        self._free[best] -= self.cluster.work.input_tokens[request]
        self._batch[best] += 1
        return best

    def publish(self) -> None:
        cluster = self.cluster
        for i in range(cluster.instances):
            waiting = cluster.waiting(i)
            self._free[i] = cluster.free_tokens(i) - cluster.length[waiting].sum()
            self._batch[i] = len(cluster.running(i)) + len(waiting)
        freeness = self._freeness()
        order = np.argsort(freeness)
        for source, target in zip(order.tolist(), order[::-1].tolist(), strict=True):
            if freeness[source] >= self.low or freeness[target] <= self.high:
                break
            if source in self._moving or target in self._moving:
                continue
            movable = cluster.decoding(source)
            if len(movable):
                request = int(movable[np.argmin(cluster.length[movable])])
                if cluster.length[request] < cluster.free_tokens(target):
                    self._moving |= {source, target}
                    cluster.start_move(request, source, target)

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        for transfer, _ in completed:
            self._moving -= {transfer.source, transfer.target}

    def _freeness(self) -> Floats:
        return self._free / np.maximum(self._batch, 1)


class Refinement(enum.Enum):
    """What moves an instance's boundary."""

    NONE = "none"
    QUALITY = "quality"
    QUANTITY = "quantity"
    MEMORY = "memory"


class Staged(Policy):
    """CascadeInfer: stages by length, boundaries refined, bid-ask between and within stages."""

    def __init__(
        self,
        cluster: Cluster,
        layout: StageLayout,
        qoe: QoeModel,
        refinement: Refinement = Refinement.QUALITY,
        within_stages: bool = True,
    ) -> None:
        super().__init__(cluster)
        if layout.instances != cluster.instances:
            raise invalid("layout", f"holds {layout.instances} instances, the cluster {cluster.instances}")
        self._layout, self._qoe, self._refinement, self._within = layout, qoe, refinement, within_stages
        self._names = [f"{i:04}" for i in range(cluster.instances)]
        self._number = {name: i for i, name in enumerate(self._names)}
        self._places: dict[str, StagePlace | None] = {}
        for i, name in enumerate(self._names):
            stage = layout.stage_of_instance(i)
            self._places[name] = StagePlace(stage, layout.stages[stage].from_tokens, layout.stages[stage].to_tokens)
        self._boundary = [float(self._place_of(i).to_tokens) for i in range(cluster.instances)]
        slots = [TransferSlots() for _ in self._names]
        self._senders = [Sender(slot) for slot in slots]
        self._receivers = [Receiver(name, slot) for name, slot in zip(self._names, slots, strict=True)]
        self._target: dict[int, int] = {}  # of requests that are won or on their way
        self._load, self._requests, self._unread = ([0] * cluster.instances for _ in range(3))  # tokens, requests there
        self._refined_s = 0.0
        self._throughput = cluster.moves.bandwidth_bytes_per_s / max(cluster.moves.kv_bytes_per_token, 1e-9)

    def place(self, request: int) -> int:
        """As the router does: the least busy by what is known and was sent; of equals the fewest tokens, then in turn."""
        tokens = int(self.cluster.work.input_tokens[request])
        group = by_preference(self._places, tokens)[0]

        def cost(i: int) -> tuple[float, int, int]:
            return occupancy(self._requests[i], self._unread[i]), self._load[i], (i - request) % len(self._load)

        best = min((self._number[name] for name in group), key=cost)
        self._load[best] += tokens
        self._requests[best] += 1
        self._unread[best] += 1
        return best

    def publish(self) -> None:
        cluster = self.cluster
        held = [cluster.held(i) for i in range(cluster.instances)]
        self._load, self._requests = [sum(s.tokens for s in one) for one in held], [len(one) for one in held]
        self._unread = [len(cluster.waiting(i)) for i in range(cluster.instances)]
        if self._refinement is not Refinement.NONE and cluster.now_s - self._refined_s >= cluster.moves.refine_s:
            self._refined_s = cluster.now_s
            self._refine(held)

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        for transfer, _ in completed:
            self._forget(transfer.request, transfer.source)
        moving = {t.request for t in self.cluster.transfers}
        for request in ended:
            if request in self._target and request not in moving:
                self._forget(request, int(self.cluster.home[request]))
        for source in range(self.cluster.instances):
            self._ask_for(source)
        self._start_transfers()

    def boundaries(self) -> list[float]:
        of_stage: dict[int, list[float]] = {}
        for i in range(self.cluster.instances):
            of_stage.setdefault(self._place_of(i).stage, []).append(self._boundary[i])
        return [float(np.mean(of_stage[s])) for s in sorted(of_stage)][:-1]

    def _place_of(self, i: int) -> StagePlace:
        place = self._places[self._names[i]]
        assert place is not None
        return place

    def _refine(self, held: list[list[InFlight]]) -> None:
        stages = self._layout.stages
        found = list(self._boundary)
        for i, name in enumerate(self._names):
            place = self._place_of(i)
            after = successors({n: p for n, p in self._places.items() if n != name}, place.stage)
            if not after:
                continue
            found[i] = refine(
                self._boundary[i],
                held[i],
                averaged([held[self._number[n]] for n in after]),
                self._qoe,
                least=place.from_tokens + 1,
                most=stages[place.stage + 1].to_tokens - 1,
                by=RefineBy(self._refinement.value),
            ).boundary
        self._boundary = found
        for i, name in enumerate(self._names):
            self._places[name] = replace(self._place_of(i), to_tokens=round(found[i]))

    def _ask_for(self, source: int) -> None:
        """Ask for every request that has outgrown this instance, and for one if it is its stage's outlier."""
        cluster, name = self.cluster, self._names[source]
        place, sender = self._place_of(source), self._senders[source]
        others = {n: p for n, p in self._places.items() if n != name}
        movable = [r for r in cluster.decoding(source).tolist() if r not in self._target]
        for r in movable:
            tokens = int(cluster.length[r])
            if tokens >= place.to_tokens and (able := outgrown_to(others, place.stage, tokens)):
                self._ask(r, source, able)
        if not self._within:
            return
        beside = peers(others, place.stage)
        excess = excess_tokens(self._load[source] - sender.tokens, [self._load[self._number[n]] for n in beside])
        left = {str(r): int(cluster.length[r]) for r in movable if r not in self._target}
        chosen = to_hand_over(left, excess)
        if chosen is not None:
            self._ask(int(chosen), source, beside)

    def _ask(self, request: int, source: int, candidates: Sequence[str]) -> None:
        cluster, name = self.cluster, str(request)
        tokens = int(cluster.length[request])
        self._senders[source].offer(name, tokens)
        ask = Ask(name, self._names[source], tokens, self._senders[source].tokens)
        bids = []
        for candidate in candidates:
            i = self._number[candidate]
            answer = self._receivers[i].bid(
                ask, load_tokens=self._load[i], idle_tokens=cluster.free_tokens(i), tokens_per_s=self._throughput
            )
            if isinstance(answer, Bid):
                bids.append(answer)
        chosen = choose(bids)
        if chosen is None:
            self._senders[source].ended(name)
            return
        target = self._number[chosen.receiver_id]
        if self._receivers[target].confirm(ask, idle_tokens=cluster.free_tokens(target)) is None:
            self._target[request] = target
            self._load[target] += tokens
            self._load[source] -= tokens
        else:
            self._senders[source].ended(name)

    def _start_transfers(self) -> None:
        for i, receiver in enumerate(self._receivers):
            receiver.look_again()
            while (turn := receiver.next()) is not None:
                request, source = int(turn.ask.request_id), self._number[turn.ask.sender_id]
                match self._senders[source].start(turn.ask.request_id, starving=turn.starving):
                    case Go.NOW:
                        self._begin(request, source, i)
                    case Go.BUSY:
                        receiver.sender_busy(turn.ask.request_id)
                    case Go.WAIT:
                        pass
        for source, sender in enumerate(self._senders):
            while (name := sender.next()) is not None:
                self._begin(int(name), source, self._target[int(name)])

    def _begin(self, request: int, source: int, target: int) -> None:
        if self.cluster.length[request] >= self.cluster.free_tokens(target):  # taken meanwhile: it stays
            self.cluster.failed_moves += 1
            self._forget(request, source)
            return
        self._receivers[target].started(str(request))
        self.cluster.start_move(request, source, target)

    def _forget(self, request: int, source: int) -> None:
        target = self._target.pop(request)
        self._senders[source].ended(str(request))
        self._receivers[target].ended(str(request))


@dataclass(frozen=True, slots=True, eq=False)
class ClusterServed:
    """What N requests felt, and what the cluster did. horizon: the time of the last arrival, tokens produced until then.

    boundaries: (time, where stages end) at every refinement interval. produced: (E) output tokens of requests ended there.
    """

    first_s: Floats
    finish_s: Floats
    horizon_s: float
    tokens_by_horizon: int
    moved: int
    moved_tokens: int
    failed_moves: int
    produced: Ints
    boundaries: list[tuple[float, list[float]]]


def serve_cluster(
    work: Workload, replica: Replica, instances: int, moves: Moves, policy: Callable[[Cluster], Policy]
) -> ClusterServed:
    """Serve a workload. Deterministic.

    Raises:
        InvalidRequest: a request longer than an instance's KV, or a layout of another number of instances.
    """
    cluster = Cluster(work, replica, moves, instances)
    rules = policy(cluster)
    arrival = work.arrival_s - work.arrival_s[0] if len(work) else work.arrival_s
    upcoming, left, tick = 0, len(work), 0
    publish_every = max(1, round(moves.publish_s / moves.tick_s))
    refine_every = max(1, round(moves.refine_s / moves.tick_s))
    tokens_by_horizon, horizon_s = -1, float(arrival[-1])
    boundaries = list[tuple[float, list[float]]]()
    while left:
        if tick % refine_every == 0:
            boundaries.append((cluster.now_s, rules.boundaries()))
        tick += 1
        until = tick * moves.tick_s
        while upcoming < len(work) and arrival[upcoming] < until:
            cluster.send(upcoming, rules.place(upcoming), float(arrival[upcoming]))
            upcoming += 1
        ended = cluster.advance(until)
        left -= len(ended)
        if tokens_by_horizon < 0 and until >= horizon_s:
            tokens_by_horizon = int((cluster.length - work.input_tokens).sum())
        rules.tick(ended, cluster.complete_moves())
        if tick % publish_every == 0:
            rules.publish()
    return ClusterServed(
        cluster.first_s,
        cluster.finish_s,
        horizon_s,
        tokens_by_horizon,
        cluster.moved,
        cluster.moved_tokens,
        cluster.failed_moves,
        cluster.produced,
        boundaries,
    )
