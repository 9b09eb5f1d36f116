"""A request inside an engine: its tokens, its computed KV and its phase. No I/O."""

import enum
import math
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, InitVar, dataclass, field

from penstock.services.domain.slo.promises import Promise
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloClass
from penstock.worker_service.scheduling.blocks import ROOT, Node


class Phase(enum.Enum):
    WAITING = "waiting"  # without blocks: not started, or preempted
    RUNNING = "running"  # with blocks
    FINISHED = "finished"


@dataclass(slots=True)
class SequenceSlo:
    """What a sequence asks for, on the clock of the steps; and what it was granted.

    due_s: when its next token is due; infinite for none. tpot_s: seconds per output token, its tightest; infinite for none.
    output_tokens: how many it will likely produce at most: a high quantile, bounded by what it may produce. again_tokens: how
    many more, each time that it has outlived what was predicted; 0 where it cannot.
    granted: STANDARD once it is admitted, BEST_EFFORT once it is not; None while it is not decided.
    """

    due_s: float
    tpot_s: float = math.inf
    output_tokens: int = 1
    granted: SloClass | None = None
    again_tokens: int = 0

    def left_tokens(self, produced: int) -> int:
        """Predicted tokens to come of a reply that has so many, at least 1."""
        left = self.output_tokens - produced
        if left < 1 and self.again_tokens > 0:
            return self.again_tokens - -left % self.again_tokens
        return max(1, left)

    @classmethod
    def requested(
        cls, slo: Slo | None, now_s: float, output_tokens: int, again_tokens: int = 0
    ) -> "SequenceSlo | None":
        """What a request that is received now asks for; None where it asks for nothing."""
        if slo is None:
            return None
        promise = Promise.received(slo, now_s)
        due_s, tpot_s = promise.first_token_due_s, promise.tightest_tpot_s()
        if due_s is None and tpot_s is None:
            return None
        return cls(
            math.inf if due_s is None else due_s,
            math.inf if tpot_s is None else tpot_s,
            output_tokens,
            again_tokens=again_tokens,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one request and the KV blocks that hold them.

    prompt, output: its tokens so far. max_output_tokens: limit on the tokens of its reply.
    tokens: prompt, then output.
    computed: number of tokens with KV in `blocks`. sealed: number of blocks in the prefix tree, `node` the last one's place.
    order: position in the queue, lower is earlier; kept on preemption.
    paused: keeps its blocks but gets no tokens, because it is migrating to another engine.
    slo: the SLO it asks for; None for none.
    """

    request_id: str
    prompt: InitVar[list[int]]
    sampling: SamplingParams
    _: KW_ONLY
    max_output_tokens: int
    output: InitVar[Seq[int]] = ()
    priority: int = 0
    slo: SequenceSlo | None = None
    cache_salt: str = ROOT
    tokens: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    order: int = -1
    phase: Phase = Phase.WAITING
    preemptions: int = 0
    paused: bool = False
    cached_prompt_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    sealed: int = 0
    node: Node = field(init=False)

    def __post_init__(self, prompt: list[int], output: Seq[int]) -> None:
        self.tokens, self.prompt_tokens, self.node = [*prompt, *output], len(prompt), self.cache_salt

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def promised(self) -> bool:
        """Whether it was admitted with its SLO."""
        return self.slo is not None and self.slo.granted is SloClass.STANDARD

    @property
    def pending(self) -> int:
        """Number of tokens without KV; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.phase is Phase.RUNNING and self.pending == 1
