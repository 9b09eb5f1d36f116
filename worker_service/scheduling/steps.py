"""One step of an engine, and the interface of policies that plan steps. No I/O."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.services.domain.instances import SloHeadroom
from penstock.services.domain.slo.draft_windows import DraftPace
from penstock.worker_service.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from penstock.worker_service.scheduling.batching import BatchScheduler


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `count` tokens of `sequence` from position `start` on, and `proposed` tokens after them, to verify these.

    logits: number of last tokens that need logits, the proposed ones included.
    """

    sequence: Sequence
    start: int
    count: int
    logits: int
    proposed: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return self.count + len(self.proposed)

    def without_proposed(self) -> "Chunk":
        return replace(self, logits=min(1, self.logits), proposed=())

    @property
    def may_propose(self) -> bool:
        """Whether the step yields the next token of a reply, so that tokens after it can be proposed."""
        return self.logits == 1 and not self.proposed


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step. `preempted`: requests that released their blocks and wait again."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


class StepInProgress:
    """A step that a policy is planning: the tokens it may still give, and what it has given."""

    def __init__(self, scheduler: "BatchScheduler", budget: int) -> None:
        self.scheduler, self.budget = scheduler, budget
        self.chunks: list[Chunk] = []
        self.preempted: list[str] = []

    def give(self, sequence: Sequence, most: int) -> int:
        """Give a running sequence up to `most` tokens, preempting others for the room; how many it got."""
        given = self.scheduler.add_chunk(sequence, min(most, self.budget), self.chunks, self.preempted)
        self.budget -= given
        return given

    def preempt(self, sequence: Sequence) -> None:
        """Have a running sequence, which was given nothing in this step, give up its blocks and wait again."""
        self.scheduler.preempt(sequence, self.preempted)

    def plan(self) -> StepPlan:
        return StepPlan(tuple(self.chunks), tuple(self.preempted))


class BatchPolicy:
    """Decides the tokens of each step. The other methods keep it informed; by default they do nothing.

    keeps_slos: sequences may ask for an SLO; `decide` answers them. Otherwise no SLO is kept.
    """

    keeps_slos = False

    @property
    def latency_correction(self) -> float | None:
        """What predicted step times are multiplied by; None where nothing is predicted."""
        return None

    def plan(self, step: StepInProgress, now_s: float) -> None:
        """Give tokens in the step that begins now."""
        raise NotImplementedError

    def decide(self, scheduler: "BatchScheduler", now_s: float, *, during_step: bool = False) -> list[Sequence]:
        """Decide on sequences that ask for an SLO; return those decided on, with `slo.granted` set.

        during_step: between `plan` and `committed`; otherwise the next step may begin now.
        """
        return []

    def headroom(self, scheduler: "BatchScheduler", now_s: float) -> SloHeadroom | None:
        """What could still be promised; None of a policy that keeps no SLOs."""
        return None

    def added(self, sequence: Sequence) -> None:
        """A sequence is new: it waits, or it runs because it has moved in."""

    def finished(self, sequence: Sequence) -> None:
        """A sequence has ended, waiting or running."""

    def preempted(self, sequence: Sequence) -> None:
        """A running sequence has given up its blocks and waits again."""

    def may_end_s(
        self, scheduler: "BatchScheduler", computed_s: float, accepted: Mapping[str, int]
    ) -> tuple[float, bool]:
        """When the tokens of the step planned last may come, and whether accepted drafts may; by default, all and at once.

        computed_s: when it was computed. accepted: by request, how many drafted tokens are right.
        """
        return computed_s, True

    def committed(self, chunks: Seq[Chunk], end_s: float) -> None:
        """These chunks of the step planned last were computed by `end_s`."""

    def proposal_limits(
        self, scheduler: "BatchScheduler", limits: Mapping[str, int], pace: Callable[[], DraftPace]
    ) -> Mapping[str, int]:
        """How many tokens may be proposed in the step planned last, by request; by default, what its budget leaves.

        limits: what that is. pace: what drafts are worth now.
        """
        return limits

    def proposed(self, chunks: Seq[Chunk]) -> None:
        """The step planned last now has these chunks: proposed tokens have been added."""

    def victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        """The running sequence with the greatest key gives up its blocks where blocks run out."""
        return queue_key(sequence)


def queue_key(sequence: Sequence) -> tuple[int, int]:
    """Who goes first: the higher priority, then who came first."""
    return -sequence.priority, sequence.order
