"""Records that instances publish about themselves and their load. No I/O."""

import enum
from dataclasses import dataclass

from penstock.services.domain.stages.qoe import InFlight
from penstock.types.mesh_status import Drafting, Loading, StagePlace

DEFAULT_MESH = "penstock"
"""The name of a mesh whose file says none."""
LOADING = "loading-"
"""Begins the id under which a worker is known while it loads its model; the rest is the id under which it serves."""


class Role(enum.Enum):
    WORKER = "worker"
    JUDGE = "judge"
    PLANNER = "planner"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model of a worker.

    max_requests: limit on running and queued requests; further ones are refused.
    tool_format: how the model writes tool calls (`services.tool_calls`); empty if its chat template takes no tools.
    tokenizer_digest: equal for models that encode and decode alike. takes_drafts: the engine verifies the drafts of requests.
    reasoning_format: how it marks its reasoning (`services.reasoning`); empty if its chat template has no such marks.
    kv_bytes_per_token: that a move sends, over all layers; 0 if requests move without KV, or not at all.
    gives_logprobs: replies come with the log-probabilities of their tokens.
    shape: a ReplicaShape's name; empty where it is not the mesh that decides, and of earlier versions.
    """

    tier: str
    model: str
    digest: str
    engine: str
    max_context_tokens: int
    kv_blocks: int
    kv_block_tokens: int
    max_requests: int
    tool_format: str = ""
    tokenizer_digest: str = ""
    takes_drafts: bool = False
    reasoning_format: str = ""
    kv_bytes_per_token: float = 0.0
    gives_logprobs: bool = True
    shape: str = ""


@dataclass(frozen=True, slots=True)
class SloHeadroom:
    """What an engine that keeps SLOs could still promise.

    backlog_s: until the prompts that are promised already are computed. prompt_tokens_per_s: in addition to the promised
    decodes. free_kv_tokens: reserved for no promise.
    """

    backlog_s: float
    prompt_tokens_per_s: float
    free_kv_tokens: int


@dataclass(frozen=True, slots=True)
class DesiredWorkers:
    """The counts of workers by tier that the leading planner asks for, as long as the plan of `revision` is in force."""

    revision: int
    counts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """An instance's load: of a worker, but for the last fields. Lengths are tokens per request, prompt and output so far.

    input_tokens: lengths of the prompts, running requests first, then queued ones.
    cached_tokens: KV of finished requests that new requests with the same prefix can reuse.
    slo: of an engine that keeps SLOs. drafting: of one that has drafting models.
    pending_tokens: of prompts, still to be computed; None if the engine does not tell. prompt_tokens_per_s: as measured in
    the last steps with prompts; 0 if unknown.
    kv_bytes_per_s: at which KV moves from here to another worker, as measured or set; 0 if unknown.
    awaited: tiers without an instance that requests of a router wait for.
    loading: of a worker that has not loaded its model yet; it has no model card and takes no requests.
    leads: of the planner that leads. desired: its, where counts follow the load.
    """

    running_tokens: tuple[int, ...] = ()
    queued_tokens: tuple[int, ...] = ()
    free_kv_blocks: int = 0
    output_tokens_per_s: float = 0.0
    input_tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    slo: SloHeadroom | None = None
    pending_tokens: int | None = None
    prompt_tokens_per_s: float = 0.0
    kv_bytes_per_s: float = 0.0
    drafting: Drafting | None = None
    awaited: tuple[str, ...] = ()
    loading: Loading | None = None
    leads: bool = False
    desired: DesiredWorkers | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts still to be computed; those of all queued requests if the engine does not tell."""
        return sum(self.queued_tokens) if self.pending_tokens is None else self.pending_tokens

    @property
    def requests(self) -> int:
        return len(self.running_tokens) + len(self.queued_tokens)

    @property
    def tokens(self) -> int:
        return sum(self.running_tokens) + sum(self.queued_tokens)

    @property
    def in_flight(self) -> list[InFlight]:
        """The running and queued sequences. If the length of the prompt is unknown, the whole sequence counts as prompt."""
        lengths = (*self.running_tokens, *self.queued_tokens)
        inputs = self.input_tokens if len(self.input_tokens) == len(lengths) else lengths
        return [InFlight(tokens, prompt) for tokens, prompt in zip(lengths, inputs, strict=True)]


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """The record that an instance publishes about itself.

    epoch, sequence: a record replaces another of the same instance if its (epoch, sequence) is greater; the epoch changes
        with every start of the process.
    lease_s: the lease of the instance expires after this time without a new record (see `MeshView`).
    place: the length stage that a worker serves; None without stages.
    admin_address: address of the administrative listener.
    group_id: the service of which this is one of several processes, all at one address; empty if it is the only one.
    tier: of a worker that loads; that of others is in their model card.
    """

    instance_id: str
    role: Role
    address: str
    epoch: float
    sequence: int
    lease_s: float
    draining: bool = False
    metrics_address: str = ""
    http_address: str = ""
    model: ModelCard | None = None
    load: Load | None = None
    place: StagePlace | None = None
    group_id: str = ""
    admin_address: str = ""
    tier: str = ""

    @property
    def loading(self) -> Loading | None:
        return self.load.loading if self.load is not None else None

    @property
    def version(self) -> tuple[float, int]:
        return self.epoch, self.sequence
