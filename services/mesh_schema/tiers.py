"""What a mesh file says of a tier and its engine."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from services.domain.early_checks import MAX_TOKENS
from services.mesh_schema.common import FROZEN, MAX_PORT, MAX_PROCESSES, Device


class SimulatedMeshEngine(BaseModel):
    """The simulated engine's latency model: T(step) = overhead + token * tokens + context * context tokens."""

    model_config = FROZEN

    overhead_ms: float = Field(default=5.0, ge=0)
    """Milliseconds that every step costs."""
    token_us: float = Field(default=50.0, ge=0)
    """Microseconds per new token in a step."""
    context_token_ns: float = Field(default=20.0, ge=0)
    """Nanoseconds per context token attended to."""
    reply_tokens: int = Field(default=64, ge=1)
    """Mean length of a reply. The length depends on the prompt only."""
    max_context_tokens: int = Field(default=8192, ge=16)
    """Largest total length of a prompt and its reply."""


MAX_DRAFT_WINDOW = 32  # beyond it, hardly any draft stands to its end


class SglangMeshEngine(BaseModel):
    """The SGLang server behind each worker of a tier: started by the worker, or already running."""

    model_config = FROZEN

    endpoint: str = ""
    """Base URL of a running server. Empty: each worker starts its own server and restarts it when it fails."""
    adapter: str = ""
    """A LoRA adapter of the tier's model: a folder in PEFT's format (a relative path is resolved against the mesh file's
    folder) or an id at the hub. The tier serves the model with it. A running server must have been started with it; several
    tiers may use one server, each with an adapter of its own or with none. Empty: none."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long a worker waits for its server to load the model."""
    gone_s: float = Field(default=10.0, gt=0)
    """A server that has not responded for this long counts as failed. A worker restarts its own server; a worker of an
    external server ends itself and is restarted."""
    python: str = ""
    """Python interpreter with sglang installed, for servers that workers start. Empty: the worker's own interpreter."""
    port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Loopback port of the first worker's server; the next workers use the next ports. 0: any free port."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: GPUs that each layer is split over."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallelism: stages that the layers are divided into."""
    dp: int = Field(default=1, ge=1)
    """Data parallelism: copies of the model behind one server."""
    ep: int = Field(default=1, ge=1)
    """Expert parallelism: groups of the tp GPUs that routed experts are divided between whole; divides tp. To send tokens
    only to the GPUs of their experts, add a backend to flags: --moe-a2a-backend deepep."""
    attn_dp: int = Field(default=1, ge=1)
    """Data-parallel attention: groups of the tp GPUs that have attention and the KV of their own requests each, instead of
    copies of the same KV; divides tp, and not with dp. The tier's limits and kv_tokens are divided between them."""
    gpus: tuple[int, ...] = ()
    """GPUs of the tier's workers in order, tp * pp * dp for each (CUDA_VISIBLE_DEVICES). Empty: the environment decides."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of a GPU's memory for weights and KV cache. None: the KV cache holds the tier's kv_tokens; if these are not
    set either, the server chooses the fraction."""
    deterministic: bool = False
    """Sampled replies depend on their seed only, so they continue unchanged at another instance. Needs a GPU attention
    backend."""
    kv_store: str = ""
    """A folder through which servers of the same model share KV, so that requests migrate between them without being
    recomputed. A relative path is resolved against the mesh file's folder. Empty: none. A tier of one worker does not use it,
    because it has no other server to share with; servers that use it start one after the other."""
    kv_store_gib: float = Field(default=32.0, gt=0)
    """Largest size of kv_store in GiB, of which each worker's server keeps to an equal part. The least recently used KV is
    deleted first."""
    structured_output: bool = True
    """Servers that workers start enforce JSON schemas, grammars and required tool calls. They keep their tokenizer for it,
    which delays the first token by about 2 ms. false: requests for a form are refused, or escalate."""
    flags: tuple[str, ...] = ()
    """Additional command-line flags, passed unchanged."""
    env: dict[str, str] = {}
    """Additional environment variables of the server."""


class MeshSpeculation(BaseModel):
    """Speculative decoding: smaller models draft the next tokens of replies, the tier's model verifies them in one pass."""

    model_config = FROZEN

    drafters: Literal["auto"] | tuple[str, ...] = ()
    """The models that may draft, each the name of another tier, a folder or an id at the hub. They are loaded in each worker,
    with a KV cache of as many tokens as the tier's, and must have the tokens of the tier's model. Which of them draft, alone
    or in a chain, and whether any does, is decided by measured speed and acceptance. `auto`: the models of the torch tiers
    before this one, but for those with other tokens. Empty: none; for engines that are torch."""
    max_window: int = Field(default=7, ge=1, le=MAX_DRAFT_WINDOW)
    """The most tokens that are drafted for a reply in one step."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        """`speculation: auto` is short for `speculation: {drafters: auto}`."""
        return {"drafters": "auto"} if value == "auto" else value


RemoteExtension = Literal[
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "reasoning_effort",
    "chat_template_kwargs",
    "structured_outputs",
]
"""A field that OpenAI's models or their relatives do not all have; the mesh file names those that an endpoint takes."""


class RemoteMeshEngine(BaseModel):
    """The endpoints of OpenAI's API behind each worker of a tier: vLLM, llama.cpp, Ollama, a hosted API, another mesh."""

    model_config = FROZEN

    endpoints: tuple[str, ...] = Field(default=(), max_length=16)
    """Base URLs with /v1, which serve the same model. Requests are sent to them in turn; one that fails or is full is tried
    after the others for 5 s."""
    key_env: str = ""
    """Environment variable with the API key, which is sent to every endpoint. Empty: no key."""
    extensions: tuple[RemoteExtension, ...] = ()
    """Fields that the endpoints take besides those that all have. Requests that need another one are refused, or escalate.
    vLLM takes all of them."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The endpoints' name of the largest length of a reply. Newer models of OpenAI need max_completion_tokens."""
    silence_s: float = Field(default=60.0, gt=0)
    """A reply whose endpoint sends nothing for so long has failed; the first token counts, too."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long a worker waits at its start for an endpoint to answer."""


class MeshEarlyCheck(BaseModel):
    """Scoring of an answer that is not finished."""

    model_config = FROZEN

    after_tokens: int = Field(ge=1, le=MAX_TOKENS)
    """How many tokens the answer has when it is scored."""
    reject_below: float = Field(ge=0, le=100)
    """With a lower score, the answer is cancelled and the request escalates."""


class MeshLongAnswers(BaseModel):
    """Long answers that are accepted from a lower score on."""

    model_config = FROZEN

    from_tokens: int = Field(ge=1, le=MAX_TOKENS)
    """How many output tokens make an answer a long one."""
    threshold: float = Field(ge=0, le=100)
    """Long answers with at least this score are accepted, also if the tier's own threshold is higher."""


class MeshTier(BaseModel):
    """One tier of the cascade."""

    model_config = FROZEN

    name: str
    """Name of the tier: 1 to 63 characters of a-z, 0-9, -, _ and `.`."""
    model: str = ""
    """A folder in Hugging Face format (a relative path is resolved against the mesh file's folder), or a model's id at the
    hub. For engine openai, the model's name at the endpoints. Not required for the simulated engine."""
    served_model_name: str = ""
    """The model's name in the API. Empty: the name of the folder (of sglang.adapter, if there is one), or the tier's name
    without a model."""
    workers: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Worker processes."""
    threshold: float | None = Field(default=None, ge=0, le=100)
    """Answers with at least this score are accepted. Required on every tier but the last."""
    skip_below: float | None = Field(default=None, ge=0, le=100)
    """The tier is passed over for prompts whose predicted score is lower. Needs router.score_predictor; not for the last
    tier. None: never."""
    early_checks: tuple[MeshEarlyCheck, ...] = ()
    """When answers that are not finished are scored, and which of them are rejected, in ascending order of after_tokens. Not
    for the last tier. Only scorers that score unfinished answers reject any. Empty: no answer is."""
    long_answers: MeshLongAnswers | None = None
    """Long answers are accepted from a lower score on: they took long, and would take longest if they escalated. Not for the
    last tier. None: length does not matter."""
    engine: Literal["torch", "sglang", "simulated", "openai"] = "torch"
    """What runs the model: torch is the built-in engine, sglang an SGLang server, simulated a latency model, openai any
    endpoint of OpenAI's API."""
    device: Device = "cpu"
    """Device that runs the model: cpu, cuda, cuda:1, ... With cuda, each worker takes the next GPU (SGLang: the next
    tp * pp * dp GPUs, if sglang.gpus is empty); with cuda:1 all workers share this one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache. auto: the type in the model's config."""
    kv_tokens: int | None = Field(default=None, ge=64)
    """Capacity of the KV cache in tokens. None: 32,768; on a GPU, as many as fit into its free memory."""
    kv_block_tokens: int = Field(default=16, ge=1)
    """Tokens in a KV block."""
    max_running: int = Field(default=32, ge=1)
    """Requests in one batch at most."""
    max_queued: int = Field(default=64, ge=0)
    """Requests that may wait in the worker; further ones are refused."""
    max_step_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed in one step at most: decoding goes first, prompts are computed in chunks of the remainder. None: 512;
    SGLang servers on a GPU choose by its memory."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Largest total length of a prompt and its reply. None: the model's context length, limited by the KV cache."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker."""
    tool_format: Literal["auto", "hermes", "llama3_json"] = "auto"
    """How the model writes tool calls. auto: what its chat template says; a model whose template takes no tools has none."""
    batch_policy: Literal["decode_first", "prefill_first", "slo"] = "decode_first"
    """Who gets how many tokens of a step. decode_first: every decode its own, prompts what is left. prefill_first: prompts
    alone while there are any. slo: SLOs are kept, by deadlines; a torch worker then measures its steps for three seconds at
    its start, and an SGLang worker its server's; to SGLang, which forms its steps itself, it is a prediction, for
    servers with dp and attn_dp 1. prefill_first is for torch and simulated engines."""
    best_effort_reserve: float = Field(default=0.05, ge=0, lt=1)
    """With batch_policy slo: the share of each step's time that requests without a kept SLO have while there are any."""
    escalation_drafts: bool = True
    """The tier gets the answer that was rejected before it as a draft, which its engine verifies in parallel instead of
    generating token by token. The answer is the same with and without it. false: it generates without a draft. SGLang
    servers get none."""
    prompt_price: float = Field(default=0.0, ge=0)
    """What a million prompt tokens cost, for `penstock usage`, in a currency of your choice."""
    output_price: float = Field(default=0.0, ge=0)
    """The same for output tokens."""
    speculation: MeshSpeculation = MeshSpeculation()
    """Models that draft for the tier's model; `auto`: those of the tiers before it. Replies stay the same."""
    openai: RemoteMeshEngine = RemoteMeshEngine()
    """For engine openai: the endpoints."""
    simulated: SimulatedMeshEngine = SimulatedMeshEngine()
    """The latency model of the simulated engine."""
    sglang: SglangMeshEngine = SglangMeshEngine()
    """The server of the sglang engine."""

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.sglang.adapter or self.model).name or self.name
