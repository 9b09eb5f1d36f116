"""The sequences that run and wait, their KV blocks, and the steps they are computed in. No I/O.

Continuous batching with chunked prefill. Which requests get how many tokens in a step is decided by a policy (`policies`), or
by a caller that hands in its own allocation.
"""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.domain.requests import FinishReason
from worker_service.scheduling.blocks import ROOT, BlockPool, OutOfBlocks
from worker_service.scheduling.policies import DecodeFirst
from worker_service.scheduling.sequence import Phase, Sequence
from worker_service.scheduling.steps import BatchPolicy, Chunk, StepInProgress, StepPlan, queue_key


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """max_running: requests that hold KV at once. max_step_tokens: tokens computed in a step."""

    max_running: int
    max_step_tokens: int


@dataclass(slots=True)
class Reservation:
    """Room for a sequence on its way here. The first `present` blocks hold its prefix; `node` is the tree's behind them."""

    blocks: list[int]
    present: int
    node: int


class BatchScheduler:
    """Sequences waiting and running over one pool of blocks.

    The loop is: `plan_step`, compute, `commit`. Between the two nothing else may be called but `add`.
    """

    def __init__(self, limits: BatchLimits, pool: BlockPool, policy: BatchPolicy | None = None) -> None:
        self.limits, self.pool, self.policy = limits, pool, policy or DecodeFirst()
        self._waiting: list[Sequence] = []  # by (priority descending, order)
        self._running: list[Sequence] = []  # in order of admission
        self._by_id: dict[str, Sequence] = {}
        self._orders = 0
        self._reserved = 0  # reservations: each keeps a place among the running
        self.preemptions = 0

    @property
    def waiting(self) -> Seq[Sequence]:
        return self._waiting

    @property
    def running(self) -> Seq[Sequence]:
        return self._running

    @property
    def free_places(self) -> int:
        """How many more sequences may run; places set aside for those on their way count as taken."""
        return self.limits.max_running - len(self._running) - self._reserved

    @property
    def idle(self) -> bool:
        return not self._by_id

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def can_ever_run(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the pool when it is alone."""
        return -(-tokens // self.pool.block_tokens) <= self.pool.count

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError if its id is taken."""
        if sequence.request_id in self._by_id:
            raise ValueError(f"{sequence.request_id} is here already")
        sequence.order = self._orders
        self._orders += 1
        self._by_id[sequence.request_id] = sequence
        self._queue(sequence)
        self.policy.added(sequence)

    def reserve(self, tokens: Seq[int]) -> Reservation:
        """Set a place and blocks aside for a sequence that brings the KV of `tokens` along.

        Only what is free is taken: nobody is preempted. OutOfBlocks, and nothing changed, if there is no room.
        """
        if self.free_places < 1:
            raise OutOfBlocks("as many requests run here as may")
        match = self.pool.match(tokens)
        needed = -(-len(tokens) // self.pool.block_tokens) - len(match.blocks)
        if not self.pool.can_take(match, needed):
            raise OutOfBlocks(f"{needed} blocks are needed, {self.pool.free} free")
        self.pool.hold(match.blocks)
        self._reserved += 1
        return Reservation([*match.blocks, *self.pool.take(needed)], len(match.blocks), match.node)

    def extend(self, reservation: Reservation, blocks: int) -> None:
        """Have at least so many blocks in a reservation. OutOfBlocks, and nothing changed, if they are not free."""
        if blocks > len(reservation.blocks):
            reservation.blocks += self.pool.take(blocks - len(reservation.blocks))

    def release(self, reservation: Reservation) -> None:
        """The sequence does not come."""
        self.pool.release(reservation.blocks)
        self._reserved -= 1

    def adopt(self, sequence: Sequence, reservation: Reservation, computed: int) -> None:
        """Start a sequence whose first `computed` tokens have their KV in the reservation's blocks.

        ValueError if its id is taken, or the blocks do not fit; nothing is changed then.
        """
        if sequence.request_id in self._by_id:
            raise ValueError(f"{sequence.request_id} is here already")
        if not 0 < computed < len(sequence.tokens):
            raise ValueError(f"KV of 1 to {len(sequence.tokens) - 1} tokens can be adopted, not {computed}")
        if len(reservation.blocks) != -(-computed // self.pool.block_tokens):
            raise ValueError(f"{len(reservation.blocks)} blocks for {computed} tokens")
        self._reserved -= 1
        sequence.order = self._orders
        self._orders += 1
        self._by_id[sequence.request_id] = sequence
        sequence.blocks, sequence.computed = reservation.blocks, computed
        sequence.sealed, sequence.node = reservation.present, reservation.node
        sequence.move(Phase.RUNNING)
        self._running.append(sequence)
        self.seal(sequence)

    def seal(self, sequence: Sequence) -> None:
        """Make the full blocks of a sequence findable; their KV must be there."""
        size = self.pool.block_tokens
        while (sequence.sealed + 1) * size <= sequence.computed:
            at = sequence.sealed
            tokens = sequence.tokens[at * size : (at + 1) * size]
            sequence.node = self.pool.seal(sequence.blocks[at], sequence.node, tokens)
            sequence.sealed += 1

    def finish(self, request_id: str, reason: FinishReason | None) -> Sequence | None:
        """Take a sequence out, wherever it is; None if there is no such one. Without a `reason` it goes on elsewhere."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return None
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
            self._give_up_blocks(sequence)
        else:
            self._waiting.remove(sequence)
        self.policy.finished(sequence)
        sequence.move(Phase.FINISHED)
        sequence.finish_reason = reason
        return sequence

    def decide(self, now_s: float) -> list[Sequence]:
        """Have the policy decide on sequences that ask for an SLO; those decided on."""
        return self.policy.decide(self, now_s)

    def plan_step(self, allocation: Mapping[str, int] | None = None, now_s: float = 0.0) -> StepPlan:
        """Decide the step that begins now: by the policy, or as `allocation` says (tokens by request id).

        An allocation may name running and waiting requests; a waiting one is started. A request gets at most what it has
        pending, and nothing where no room can be made for it. ValueError for an unknown request, a count under 1, or
        more than the step's budget in all.
        """
        step = StepInProgress(self, self.limits.max_step_tokens)
        if allocation is None:
            self.policy.plan(step, now_s)
            return step.plan()
        for request_id, count in allocation.items():
            if request_id not in self._by_id:
                raise ValueError(f"no request {request_id}")
            if count < 1:
                raise ValueError(f"{request_id} must get at least one token, not {count}")
        if sum(allocation.values()) > self.limits.max_step_tokens:
            raise ValueError(f"{sum(allocation.values())} tokens, but a step has {self.limits.max_step_tokens}")
        named = frozenset(allocation)
        for request_id, count in allocation.items():
            sequence = self._by_id[request_id]
            if sequence.phase is Phase.WAITING and not step.start(sequence):
                continue
            step.give(sequence, count, keep=named)
        return step.plan()

    def commit(self, plan: StepPlan, sampled: Mapping[str, Seq[int]], end_s: float = 0.0) -> None:
        """The step was computed by `end_s`.

        `sampled` has the new tokens of each request that wanted logits (verified ones: none).
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            self.seal(sequence)
            sequence.tokens.extend(sampled.get(sequence.request_id, ()))
        self.policy.committed(plan.chunks, end_s)

    def start(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence, reusing what is known of its prefix; False if there is no room for all its tokens."""
        if self.free_places < 1:
            return False
        pool, last = self.pool, len(sequence.tokens) - 1 - sequence.draft
        match = pool.shortened(pool.match(sequence.tokens), sequence.tokens, last)
        needed = -(-len(sequence.tokens) // pool.block_tokens) - len(match.blocks)
        if not pool.can_take(match, needed):
            return False
        pool.hold(match.blocks)
        sequence.blocks = list(match.blocks)
        sequence.computed, sequence.sealed, sequence.node = match.tokens, len(match.blocks), match.node
        if sequence.preemptions == 0:
            sequence.cached_prompt_tokens = min(match.tokens, sequence.prompt_tokens)
        self._waiting.remove(sequence)
        sequence.move(Phase.RUNNING)
        self._running.append(sequence)
        return True

    def add_chunk(
        self,
        sequence: Sequence,
        most: int,
        chunks: list[Chunk],
        preempted: list[str],
        keep: frozenset[str] = frozenset(),
    ) -> int:
        """Give `sequence` up to `most` tokens, preempting others for the room; return how many it got."""
        if sequence.phase is not Phase.RUNNING or sequence.paused:
            return 0
        there, computed = len(sequence.tokens), sequence.computed
        count = there - computed
        if most < count:
            count = most
        if count < 1:
            return 0
        end = computed + count
        needed = -(-end // self.pool.block_tokens) - len(sequence.blocks)
        if needed > 0:
            while needed > self.pool.free:
                victim = self._victim(keep, chunks)
                if victim is None or victim is sequence:
                    if victim is sequence:
                        self.preempt(sequence, preempted)
                    return 0
                self.preempt(victim, preempted)
            sequence.blocks += self.pool.take(needed)
        wanted = end - (there - 1 - sequence.draft)
        chunks.append(Chunk(sequence, computed, count, min(max(0, wanted), count)))
        return count

    def _victim(self, keep: frozenset[str], chunks: list[Chunk]) -> Sequence | None:
        """Who gives up its blocks: of the lowest priority, the one admitted last, never one at work now or leaving."""
        busy = {id(chunk.sequence) for chunk in chunks}
        able = [s for s in self._running if id(s) not in busy and s.request_id not in keep and not s.paused]
        if not able:
            return None
        return max(able, key=self.policy.victim_key)

    def preempt(self, sequence: Sequence, preempted: list[str]) -> None:
        """Have a running sequence give up its blocks and wait again; its tokens stay."""
        self._running.remove(sequence)
        self._give_up_blocks(sequence)
        self.policy.preempted(sequence)
        sequence.move(Phase.WAITING)
        sequence.preemptions += 1
        self.preemptions += 1
        preempted.append(sequence.request_id)
        self._queue(sequence)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.sealed = 0
        sequence.node = ROOT

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=queue_key)
