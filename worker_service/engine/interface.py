"""What a worker expects of an engine: one small protocol for all, and one more for each capability's caller."""

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from services.domain.instances import Load
from services.domain.requests import FinishReason, GenerationRequest, SamplingParams, TokenFrame, TokenUsage
from worker_service.scheduling import BatchScheduler
from worker_service.text import Tokenizer


class Capability(enum.Enum):
    """What an engine can do; callers and tests go by these, never by an engine's name.

    SEEDED_SAMPLING: a sampled reply is a function of seed and position, so it goes on unchanged elsewhere.
    PRIORITIES: waiting requests go by priority.
    VERIFY_SAMPLED: a sampled draft token stands if it is the very token drawn.
    VERIFY_REJECTION: a draft with its distributions is verified by rejection sampling.
    """

    LOGPROBS = "logprobs"
    PREFIX_REUSE = "prefix_reuse"
    TOKEN_ALLOCATION = "token_allocation"
    KV_TRANSFER = "kv_transfer"
    VERIFY_GREEDY = "verify_greedy"
    VERIFY_SAMPLED = "verify_sampled"
    VERIFY_REJECTION = "verify_rejection"
    SEEDED_SAMPLING = "seeded_sampling"
    PRIORITIES = "priorities"


class EngineUnusable(Exception):
    """This engine cannot serve what it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves and can do."""

    engine: str
    model: str
    model_digest: str
    max_context_tokens: int
    kv_blocks: int
    kv_block_tokens: int
    max_requests: int
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True)
class Admitted:
    """First event of a request: it will be served. `best_effort`: without a promise about latency."""

    prompt_tokens: int
    max_output_tokens: int
    best_effort: bool = True


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a request."""

    reason: FinishReason
    usage: TokenUsage
    stop: str | None = None
    preemptions: int = 0


EngineEvent = Admitted | TokenFrame | Finished


class Engine(Protocol):
    """All engines."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        ...

    @property
    def steps(self) -> int | None:
        """Steps computed since the start; None where the engine does not tell."""
        ...

    @property
    def preemptions(self) -> int: ...

    async def start(self) -> None:
        """Load the model; returns when requests can come. EngineUnusable."""
        ...

    async def close(self) -> None:
        """End all requests with ABORTED and free everything."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineEvent, None]:
        """Admitted, then frames without gap or overlap, then Finished. Leaving the iteration aborts the request.

        InvalidRequest, AlreadyRunning, Overloaded (queue full), Unavailable (the engine failed).
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request within a step; False if it is not running."""
        ...

    def load(self) -> Load: ...

    async def failed(self) -> BaseException:
        """Return, with the cause, once the engine has failed for good."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """For the mesh: an engine that may be away for a while and come back by itself."""

    def availability(self) -> AsyncIterator[bool]:
        """Whether requests can be served, now and whenever that changes; without end."""
        ...


# Tokens for each request in the next step; None leaves it to the engine.
Allocator = Callable[[BatchScheduler], Mapping[str, int] | None]


@runtime_checkable
class TokenAllocating(Protocol):
    """For schedulers: every step takes an explicit number of tokens per request."""

    def allocate_by(self, allocator: Allocator | None) -> None: ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two engines must share to exchange KV blocks. One block: (layers, 2, block_tokens, kv_heads, head_dim)."""

    model_digest: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        size = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        return self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim * size


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """KV of consecutive blocks of one sequence from `first_block` on.

    data: (blocks, layers, 2, block_tokens, kv_heads, head_dim); bfloat16 travels as uint16.
    tokens: the sequence's tokens whose KV is computed, all of them, from position 0.
    """

    layout: KvLayout
    first_block: int
    tokens: tuple[int, ...]
    data: npt.NDArray[np.generic]


@runtime_checkable
class KvTransferring(Protocol):
    """For migration: a running request's KV can leave and enter."""

    @property
    def kv_layout(self) -> KvLayout: ...

    async def export_kv(self, request_id: str, first_block: int = 0) -> KvBlocks:
        """A copy of the request's computed KV from `first_block` on; it goes on running. NotFound."""
        ...

    def generate_from(self, request: GenerationRequest, kv: KvBlocks) -> AsyncGenerator[EngineEvent, None]:
        """Like generate, but the KV of `kv.tokens`, a prefix of prompt and resume tokens, is taken over.

        InvalidRequest (another layout, other tokens, blocks missing), Overloaded (no room).
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """A drafting model's distribution at one position; what is left out has probability 0."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """`accepted` draft tokens stand, and `next_token` is the verifier's own behind them."""

    accepted: int
    next_token: int


@runtime_checkable
class Verifying(Protocol):
    """For speculation: a draft is checked against a prefix in one forward pass."""

    async def verify(
        self,
        request_id: str,
        prefix: Seq[int],
        draft: Seq[int],
        sampling: SamplingParams,
        *,
        offset: int = 0,
        distributions: Seq[DraftDistribution] = (),
    ) -> Verification:
        """Greedy, or sampled at output positions from `offset` on.

        Without `distributions` a draft token stands if it is the very token that this engine would have drawn: the text
        is the one without a draft. With them it stands by rejection sampling: the distribution is the one without.
        InvalidRequest, AlreadyRunning, Overloaded, Unavailable.
        """
        ...
