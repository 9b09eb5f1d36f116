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
    PREFIX_TRANSFER: running requests move by their tokens; the target loads or computes the prefix ahead.
    VERIFY_SAMPLED: a sampled draft token stands if it is the very token drawn.
    STRUCTURED_OUTPUT: a reply's form is enforced, token by token.
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
    PREFIX_TRANSFER = "prefix_transfer"
    STRUCTURED_OUTPUT = "structured_output"


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


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Last event too: the reply goes on in another engine, from output position `offset` on."""

    offset: int


EngineEvent = Admitted | TokenFrame | Finished | HandedOver


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

        One that is aborted while its prompt is tokenized is Finished without having been Admitted.

        Raises:
            InvalidRequest: the model cannot take it; PromptTooLong among them.
            AlreadyRunning: a request of this id is here.
            Overloaded: the queue is full.
            RequestFailed: this request, and no other, cannot be computed.
            Unavailable: the engine failed.
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

    def blocks_from(self, data: bytes, blocks: int) -> "Blocks":
        """The array behind the bytes of so many blocks. ValueError if they are more or fewer."""
        if len(data) != blocks * self.block_bytes:
            raise ValueError(f"{len(data)} bytes for {blocks} blocks of {self.block_bytes}")
        shape = (blocks, self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)
        kind = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        return np.frombuffer(bytearray(data), kind).reshape(shape)  # a copy: torch wants memory that may be written


Blocks = npt.NDArray[np.generic]
"""KV of consecutive blocks: (blocks, layers, 2, block_tokens, kv_heads, head_dim); bfloat16 travels as uint16."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request that was stopped between two steps: all its tokens, the last one without KV, of which the last
    `output_tokens` are the reply's; the blocks not yet sent."""

    tokens: tuple[int, ...]
    output_tokens: int
    data: Blocks


@dataclass(frozen=True, slots=True)
class LastBlocks:
    """What a stopped request brings with it: consecutive blocks, from block `first` on."""

    first: int
    data: Blocks


@runtime_checkable
class KvTransferring(Protocol):
    """For migration: a running request's KV can leave, and enter elsewhere, while both engines compute."""

    @property
    def kv_layout(self) -> KvLayout: ...

    async def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        """The tokens of a decoding request whose KV is there. NotFound (not here, waiting, computing its prompt)."""
        ...

    async def read_kv(self, request_id: str, first_block: int, blocks: int) -> Blocks:
        """A copy of whole blocks of a decoding request, made beside the steps. NotFound, InvalidRequest."""
        ...

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        """Stop a decoding request between two steps and copy its blocks from `first_block` on; its tokens so far are
        handed out at once. NotFound, InvalidRequest."""
        ...

    async def resume(self, request_id: str) -> None:
        """A stopped request goes on as if nothing had been; no error where it has ended."""
        ...

    async def leave(self, request_id: str) -> HandedOver:
        """A stopped request runs elsewhere: its stream ends with HandedOver, at once. NotFound (it has ended)."""
        ...

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Seq[int]) -> int:
        """Make room for a request whose computed tokens are these; return how many of its first blocks are here already.

        Only what is idle is taken. InvalidRequest (another layout), AlreadyRunning (the transfer), Overloaded (no room).
        """
        ...

    async def write_kv(self, transfer_id: str, first_block: int, data: Blocks) -> None:
        """Fill reserved blocks, and as many more as needed, beside the steps. NotFound, InvalidRequest, Overloaded."""
        ...

    def enter(
        self, transfer_id: str, request: GenerationRequest, tokens: Seq[int], last: LastBlocks | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        """Like generate, but what was written is taken over and the reply goes on behind `tokens`, prompt included.

        last: blocks to write before that, between the same two steps. NotFound, InvalidRequest, AlreadyRunning, Overloaded.
        The reservation is gone in any case.
        """
        ...

    async def release(self, transfer_id: str) -> None:
        """Give a reservation back; no error where there is none."""
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
