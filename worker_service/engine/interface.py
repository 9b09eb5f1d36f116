"""The interface of engines: a small protocol for all, and one for each capability."""

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from services.domain.instances import Load
from services.domain.requests import (
    NO_DEFAULTS,
    FinishReason,
    GenerationRequest,
    SamplingDefaults,
    SamplingParams,
    TokenFrame,
    TokenUsage,
)
from services.event_streams import OnTokens
from worker_service.scheduling import BatchScheduler
from worker_service.text import Tokenizer


class Capability(enum.Enum):
    """The capabilities of an engine. Callers and tests depend on these, not on the engine's name.

    SEEDED_SAMPLING: a sampled reply depends only on seed and position, so it continues unchanged on another instance.
    PRIORITIES: waiting requests are ordered by priority.
    PREFIX_TRANSFER: running requests move as tokens; the target loads or computes the prefix in advance.
    STRUCTURED_OUTPUT: the form of a reply is enforced, token by token.
    SLO: requests are admitted with an SLO only where it can be kept. Other engines serve them as best effort.
    SLO_PREDICTED: likewise, but by a prediction of steps that the engine does not form itself.
    VERIFY_SAMPLED: a sampled draft token is accepted if the engine draws the same token.
    VERIFY_REJECTION: a draft with its distributions is verified by rejection sampling.
    ADAPTER: the model is one with a LoRA adapter.
    DRAFTS: the draft of a request is verified; other engines ignore it.
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
    SLO = "slo"
    DRAFTS = "drafts"
    SLO_PREDICTED = "slo_predicted"
    ADAPTER = "adapter"


def capabilities_of_own_steps(*, keeps_slos: bool) -> frozenset[Capability]:
    """What an engine can do that forms its steps itself."""
    return (
        frozenset(Capability)
        - {Capability.SLO_PREDICTED, Capability.ADAPTER}
        - (set() if keeps_slos else {Capability.SLO})
    )


class EngineUnusable(Exception):
    """The engine cannot serve the model; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model and the capabilities of an engine.

    sampling_defaults: of the model, for what a request does not set; None: the engine applies them itself.
    """

    engine: str
    model: str
    model_digest: str
    max_context_tokens: int
    kv_blocks: int
    kv_block_tokens: int
    max_requests: int
    capabilities: frozenset[Capability]
    sampling_defaults: SamplingDefaults | None = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class Admitted:
    """First event of a request: it will be served. `best_effort`: without a latency guarantee."""

    prompt_tokens: int
    max_output_tokens: int
    best_effort: bool = True


@dataclass(frozen=True, slots=True)
class Declined:
    """First event of a request whose SLO cannot be kept and that is not served as best effort; Finished follows."""

    reason: str


NOT_KEPT = "the SLO cannot be kept here"
"""The reason of a decline by admission."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a request. drafted_tokens, accepted_drafted_tokens: of drafting models, verified and accepted; drafts
    that came with the request are in its usage."""

    reason: FinishReason
    usage: TokenUsage
    stop: str | None = None
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_drafted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Last event of a request that continues in another engine, from output position `offset` on."""

    offset: int


EngineEvent = Admitted | Declined | TokenFrame | Finished | HandedOver


class Engine(Protocol):
    """The protocol of all engines."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    @property
    def steps(self) -> int | None:
        """Steps computed since the start; None if unknown."""
        ...

    @property
    def preemptions(self) -> int: ...

    async def start(self) -> None:
        """Load the model; returns when requests can be served.

        Raises:
            EngineUnusable: The engine cannot serve the model.
        """
        ...

    async def close(self) -> None:
        """End all requests with ABORTED and release all resources."""
        ...

    def generate(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        """Admitted, then frames without gap or overlap, then Finished. Leaving the iteration aborts the request.

        Declined, then Finished: its SLO cannot be kept (`decline_unkept_slo`).

        on_tokens: takes the frames, once the iteration goes on behind Admitted; only the other events are iterated then.
        One that is aborted while its prompt is tokenized is Finished without having been Admitted.

        Raises:
            InvalidRequest: The model cannot process the request; PromptTooLong is a subclass.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The queue is full.
            RequestFailed: This request cannot be computed; others are not affected.
            Unavailable: The engine failed.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request within a step; False if it is not running."""
        ...

    def load(self) -> Load: ...

    async def failed(self) -> BaseException:
        """Wait until the engine has failed for good; return the cause."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine that may be unavailable for a while and recovers by itself."""

    def availability(self) -> AsyncIterator[bool]:
        """Yield whether requests can be served, now and at every change, without end."""
        ...


# Tokens for each request in the next step; None: the engine decides.
Allocator = Callable[[BatchScheduler], Mapping[str, int] | None]


@runtime_checkable
class TokenAllocating(Protocol):
    """For external schedulers: each step computes an explicit number of tokens per request."""

    def allocate_by(self, allocator: Allocator | None) -> None: ...


@runtime_checkable
class StepPredicting(Protocol):
    """For metrics: an engine that predicts its step times, and corrects the predictions by what steps take."""

    @property
    def latency_correction(self) -> float | None:
        """The factor applied to predictions now; None where the engine's policy predicts nothing."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """Counts of drafted tokens since the start, by source: `model` for models that draft, `given` for drafts that came with
    requests. chain, window: the models that draft now, small to large, and how many tokens the first one drafts; empty and 0
    where the engine's model computes alone. accepted_share: of the last tokens of drafting models that were verified; None
    before the first. drafts: whether there are drafting models."""

    verified: Mapping[str, int]
    accepted: Mapping[str, int]
    failures: Mapping[str, int]
    chain: tuple[str, ...]
    window: int
    accepted_share: float | None = None
    drafts: bool = False


@runtime_checkable
class Speculating(Protocol):
    """For metrics: an engine that verifies drafts of running replies."""

    def speculation(self) -> SpeculationState: ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV layout, which two engines must share to exchange blocks: (layers, 2, elements).

    A block's keys and values of a layer have block_tokens * kv_heads * head_dim elements, in the order of the engine's pool.
    """

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

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_tokens

    def blocks_from(self, data: bytes | memoryview, blocks: int) -> "Blocks":
        """The memory of `data` as an array: read-only if `data` is.

        Raises:
            ValueError: The length does not match the number of blocks.
        """
        if len(data) != blocks * self.block_bytes:
            raise ValueError(f"{len(data)} bytes for {blocks} blocks of {self.block_bytes}")
        shape = (blocks, self.layers, 2, self.block_tokens * self.kv_heads * self.head_dim)
        kind = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        return np.frombuffer(data, kind).reshape(shape)


Blocks = npt.NDArray[np.generic]
"""KV of consecutive blocks: (blocks, layers, 2, elements); bfloat16 is transferred as uint16."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request that was paused between two steps.

    tokens: all its tokens; the last one has no KV, and the last `output_tokens` are the reply's. data: the blocks not yet
    sent.
    """

    tokens: tuple[int, ...]
    output_tokens: int
    data: Blocks


@dataclass(frozen=True, slots=True)
class LastBlocks:
    """The last blocks of a paused request, consecutive from block `first` on."""

    first: int
    data: Blocks


@runtime_checkable
class KvTransferring(Protocol):
    """For migration: the KV of a running request moves to another engine while both engines compute."""

    @property
    def kv_layout(self) -> KvLayout: ...

    async def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        """The tokens of a decoding request that have KV.

        Raises:
            NotFound: The request is unknown, waiting, or computing its prompt.
        """
        ...

    async def read_kv(self, request_id: str, first_block: int, blocks: int, out: Blocks | None = None) -> Blocks:
        """Copy full blocks of a decoding request, concurrently with steps; into `out` if it is given.

        Raises:
            NotFound: The request is not decoding here.
            InvalidRequest: The blocks are not full.
        """
        ...

    async def rehearse_read(self, out: Blocks) -> None:
        """Copy as many blocks as `out` has room for, whatever they hold: takes as long as `read_kv`. For measurements."""
        ...

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        """Pause a decoding request between two steps and copy its blocks from `first_block` on; emit its tokens so far.

        Raises:
            NotFound: The request is not decoding here.
            InvalidRequest: There is no such block.
        """
        ...

    async def resume(self, request_id: str) -> None:
        """Resume a paused request; no error if it has ended."""
        ...

    async def leave(self, request_id: str) -> HandedOver:
        """End the stream of a paused request that runs in another engine with HandedOver, at once.

        Raises:
            NotFound: The request has ended.
        """
        ...

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Seq[int], cache_salt: str = "") -> int:
        """Reserve room for a request with these computed tokens; return how many of its first blocks are present already.

        cache_salt: of the request.

        Uses only idle resources.

        Raises:
            InvalidRequest: The layout differs.
            AlreadyRunning: The transfer has a reservation.
            Overloaded: There is not enough idle KV.
        """
        ...

    async def write_kv(self, transfer_id: str, first_block: int, data: Blocks) -> None:
        """Write reserved blocks, and further ones as needed, concurrently with steps. `data` may be read-only.

        Raises:
            NotFound: There is no such reservation.
            InvalidRequest: The blocks are present already.
            Overloaded: There is not enough idle KV.
        """
        ...

    async def prepare_entry(self, transfer_id: str, request: GenerationRequest) -> None:
        """Compute what `enter` needs of the request itself (its tokenized prompt, its grammar) while its KV is on the way.

        Without this, `enter` does so, during the pause of the request. Dropped by `enter` and `release`.

        Raises:
            InvalidRequest, Overloaded, RequestFailed: As in `generate`.
            NotFound: The request was aborted.
        """
        ...

    def enter(
        self,
        transfer_id: str,
        request: GenerationRequest,
        tokens: Seq[int],
        last: LastBlocks | None = None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncGenerator[EngineEvent, None]:
        """Like `generate`, but with the KV of the reservation: the reply continues behind `tokens`, which include the prompt.

        last: blocks to write first, between the same two steps. The reservation is removed in any case.

        Raises:
            NotFound: There is no such reservation.
            InvalidRequest: The tokens do not match the request or the blocks.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: There is no room for the last blocks.
        """
        ...

    async def release(self, transfer_id: str) -> None:
        """Release a reservation; no error if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The distribution of a draft model at one position. Tokens that are not listed have probability 0."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """The first `accepted` draft tokens are accepted; `next_token` is the verifier's token behind them."""

    accepted: int
    next_token: int


@runtime_checkable
class Verifying(Protocol):
    """For speculative decoding: verifies a draft behind a prefix in one forward pass."""

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

        Without `distributions`, a draft token is accepted if this engine draws the same token, so the text is the same as
        without a draft. With them, it is accepted by rejection sampling, which keeps the distribution.

        Raises:
            InvalidRequest: The draft is invalid.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The queue is full.
            Unavailable: The engine failed.
        """
        ...
