"""The interface of engines: a small protocol for all, and one for each capability."""

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.services.domain.instances import Load
from penstock.services.event_streams import OnTokens
from penstock.types.mesh_status import Drafting
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import NO_DEFAULTS, SamplingDefaults
from penstock.types.workers import Admitted, Declined, EngineFinished, HandedOver, KvLayout
from penstock.worker_service.text.tokenizer import Tokenizer


class Capability(enum.Enum):
    """The capabilities of an engine. Callers and tests depend on these, not on the engine's name.

    SEEDED_SAMPLING: a sampled reply depends only on seed and position, so it continues unchanged on another instance.
    PRIORITIES: waiting requests are ordered by priority.
    PREFIX_TRANSFER: running requests move as tokens; the target loads or computes the prefix in advance.
    STRUCTURED_OUTPUT: the form of a reply is enforced, token by token.
    SLO: requests are admitted with an SLO only where it can be kept. Other engines serve them as best effort.
    SLO_PREDICTED: likewise, but by a prediction of steps that the engine does not form itself.
    ADAPTER: the model is one with a LoRA adapter.
    DRAFTS: the draft of a request is verified; other engines ignore it.
    """

    LOGPROBS = "logprobs"
    PREFIX_REUSE = "prefix_reuse"
    KV_TRANSFER = "kv_transfer"
    SEEDED_SAMPLING = "seeded_sampling"
    PRIORITIES = "priorities"
    PREFIX_TRANSFER = "prefix_transfer"
    STRUCTURED_OUTPUT = "structured_output"
    SLO = "slo"
    DRAFTS = "drafts"
    SLO_PREDICTED = "slo_predicted"
    ADAPTER = "adapter"


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


NOT_KEPT = "the SLO cannot be kept here"
"""The reason of a decline by admission."""


EngineEvent = Admitted | Declined | TokenFrame | EngineFinished | HandedOver
EngineEvents = AsyncGenerator[EngineEvent, None]


class Engine(Protocol):
    """The protocol of all engines."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def steps(self) -> int | None:
        """Steps computed since the start; None if unknown."""

    @property
    def preemptions(self) -> int: ...

    async def start(self) -> None:
        """Load the model; returns when requests can be served.

        Raises:
            EngineUnusable: The engine cannot serve the model.
        """

    async def close(self) -> None:
        """End all requests with ABORTED and release all resources."""

    def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> EngineEvents:
        """Admitted, then frames without gap or overlap, then Finished. Leaving the iteration aborts the request.

        Declined, then Finished: its SLO cannot be kept (`decline_unkept_slo`).

        on_tokens: takes the frames, once the iteration continues after Admitted; only the other events are iterated then.
        One that is aborted while its prompt is tokenized is Finished without having been Admitted.

        Raises:
            InvalidRequest: The model cannot process the request; PromptTooLong is a subclass.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The queue is full.
            RequestFailed: This request cannot be computed; others are not affected.
            Unavailable: The engine failed.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request within a step; False if it is not running."""

    def load(self) -> Load: ...

    async def failed(self) -> BaseException:
        """Wait until the engine has failed for good; return the cause."""


@runtime_checkable
class Interruptible(Protocol):
    """An engine that may be unavailable for a while and recovers by itself."""

    def availability(self) -> AsyncIterator[bool]:
        """Yield whether requests can be served, now and at every change, without end."""


@runtime_checkable
class StepPredicting(Protocol):
    """For metrics: an engine that predicts its step times, and corrects the predictions by what steps take."""

    @property
    def latency_correction(self) -> float | None:
        """The factor applied to predictions now; None where the engine's policy predicts nothing."""


@dataclass(slots=True)
class DraftCounts:
    """What came of proposed tokens. failures: sources that raised, and passes that failed because of proposed tokens."""

    verified: int = 0
    accepted: int = 0
    failures: int = 0

    def add(self, verified: int, accepted: int) -> None:
        self.verified += verified
        self.accepted += accepted


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """counts: since the start, by source: `model` for models that draft, `given` for drafts that came with requests.
    drafting: what drafts now; None without drafting models."""

    counts: Mapping[str, DraftCounts]
    drafting: Drafting | None = None


@runtime_checkable
class Speculating(Protocol):
    """For metrics: an engine that verifies drafts of running replies."""

    def speculation(self) -> SpeculationState: ...


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

    async def read_kv(self, request_id: str, first_block: int, blocks: int, out: Blocks | None = None) -> Blocks:
        """Copy full blocks of a decoding request, concurrently with steps; into `out` if it is given.

        Raises:
            NotFound: The request is not decoding here.
            InvalidRequest: The blocks are not full.
        """

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        """Pause a decoding request between two steps and copy its blocks from `first_block` on; emit its tokens so far.

        Raises:
            NotFound: The request is not decoding here.
            InvalidRequest: There is no such block.
        """

    async def resume(self, request_id: str) -> None:
        """Resume a paused request; no error if it has ended."""

    async def leave(self, request_id: str) -> HandedOver:
        """End the stream of a paused request that runs in another engine with HandedOver, at once.

        Raises:
            NotFound: The request has ended.
        """

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Reserve room for a request with these computed tokens; return how many of its first blocks are present already.

        cache_salt: of the request.

        Uses only idle resources.

        Raises:
            InvalidRequest: The layout differs.
            AlreadyRunning: The transfer has a reservation.
            Overloaded: There is not enough idle KV.
        """

    async def write_kv(self, transfer_id: str, first_block: int, data: Blocks) -> None:
        """Write reserved blocks, and further ones as needed, concurrently with steps. `data` may be read-only.

        Raises:
            NotFound: There is no such reservation.
            InvalidRequest: The blocks are present already.
            Overloaded: There is not enough idle KV.
        """

    async def prepare_entry(self, transfer_id: str, request: GenerationRequest) -> None:
        """Compute what `enter` needs of the request itself (its tokenized prompt, its grammar) while its KV is on the way.

        Without this, `enter` does so, during the pause of the request. Dropped by `enter` and `release`.

        Raises:
            InvalidRequest, Overloaded, RequestFailed: As in `generate`.
            NotFound: The request was aborted.
        """

    def enter(
        self,
        transfer_id: str,
        request: GenerationRequest,
        tokens: Sequence[int],
        last: LastBlocks | None = None,
        on_tokens: OnTokens | None = None,
    ) -> EngineEvents:
        """Like `generate`, but with the KV of the reservation: the reply continues after `tokens`, which include the prompt.

        last: blocks to write first, between the same two steps. The reservation is removed in any case.

        Raises:
            NotFound: There is no such reservation.
            InvalidRequest: The tokens do not match the request or the blocks.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: There is no room for the last blocks.
        """

    async def release(self, transfer_id: str) -> None:
        """Release a reservation; no error if there is none."""


def blocks_from(layout: KvLayout, data: bytes | memoryview, blocks: int) -> Blocks:
    """The memory of `data` as an array: read-only if `data` is.

    Raises:
        ValueError: The length does not match the number of blocks.
    """
    if len(data) != blocks * layout.block_bytes:
        raise ValueError(f"{len(data)} bytes for {blocks} blocks of {layout.block_bytes}")
    shape = (blocks, layout.layers, 2, layout.block_tokens * layout.kv_heads * layout.head_dim)
    kind = np.dtype("uint16" if layout.dtype == "bfloat16" else layout.dtype)
    return np.frombuffer(data, kind).reshape(shape)
