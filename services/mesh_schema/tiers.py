"""What a mesh file says of a tier and its engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from penstock.services.mesh_schema.common import FROZEN, MAX_PROCESSES, Device
from penstock.types.rules import TierRules

MAX_DRAFT_WINDOW = 32  # beyond it, hardly any draft is accepted to its end


class MeshSpeculation(BaseModel):
    """Speculative decoding: smaller models draft the next tokens of replies, the tier's model verifies them in one pass."""

    model_config = FROZEN

    drafters: Literal["auto"] | tuple[str, ...] = ()
    """The models that may draft, each the name of another tier, a folder or an id at the hub. They are loaded in each worker,
    with a KV cache of as many tokens as the tier's, and must have the tokens of the tier's model. Which of them draft, alone
    or in a chain, and whether any does, is decided by measured speed and acceptance. `auto`: the models of the tiers
    before this one on the same engine, but for those with other tokens. Empty: none. For torch and llamacpp."""
    max_window: int = Field(default=7, ge=1, le=MAX_DRAFT_WINDOW)
    """The most tokens that are drafted for a reply in one step."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        """`speculation: auto` is short for `speculation: {drafters: auto}`."""
        return {"drafters": "auto"} if value == "auto" else value


class MeshTier(BaseModel, TierRules, frozen=True):
    """One tier of the cascade."""

    model_config = FROZEN

    name: str
    """Name of the tier: 1 to 63 characters of a-z, 0-9, -, _ and `.`."""
    model: str = ""
    """A folder in Hugging Face format, a GGUF file (relative paths are resolved against the mesh file's folder), or a model's
    id at the hub. For engine openai, the model's name at the endpoints. Not required for the simulated engine."""
    adapter: str = ""
    """A LoRA adapter of the model: a folder in PEFT's format (a relative path is resolved against the mesh file's folder) or
    an id at the hub. The tier serves the model with it. A running server must have been started with it; several tiers may
    use one server, each with an adapter of its own or with none. For the sglang engine. Empty: none."""
    served_model_name: str = ""
    """The model's name in /v1/models and the metrics; requests name the tier. Empty: the name of the folder or file (of the
    adapter, if there is one), or the tier's name without a model."""
    workers: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Worker processes."""
    threshold: float | None = Field(default=None, ge=0, le=100)
    """Answers with at least this score are accepted; with 0 all, without a judge. Required on every tier but the last."""
    engine: str = "torch"
    """What runs the model, by its entry point: torch is the built-in engine, llamacpp the same on llama.cpp, for GGUF models,
    sglang an SGLang server, simulated a latency model, openai any endpoint of OpenAI's API; installed packages may add
    others. Its own options are below its name, for example `sglang: {tp: 2}`. Default: llamacpp for a GGUF file."""
    device: Device = "cpu"
    """Device that runs the model: cpu, cuda, cuda:1, ... With cuda, each worker takes the next GPU (SGLang: the next
    tp * pp * dp GPUs, if sglang.gpus is empty); with cuda:1 all workers share this one."""
    gpu_type: str = ""
    """The type of GPU that its workers need, where the cluster has several: on Ray a resource of nodes, such as
    `accelerator_type:H100` or one of your own. Empty: any."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache. auto: the type in the model's config; on a CPU without instructions for it, float32."""
    kv_tokens: int | None = Field(default=None, ge=64)
    """Capacity of the KV cache in tokens. None: as many as max_running requests may have and as fit: on a GPU into its free
    memory; on a host into a quarter of it and as many bytes as the weights have, or 256 MiB. SGLang on a CPU: 32,768."""
    kv_block_tokens: int = Field(default=16, ge=1)
    """Tokens in a KV block."""
    max_running: int = Field(default=32, ge=1)
    """Requests in one batch at most."""
    max_queued: int = Field(default=64, ge=0)
    """Requests that may wait in the worker; further ones are refused."""
    max_step_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed in one step at most: decoding goes first, prompts are computed in chunks of the remainder. None: 512,
    or as many as take two seconds; SGLang servers on a GPU choose by its memory."""
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
    measuring_s: float = Field(default=15.0, ge=1)
    """How many seconds the built-in engine measures its model at its start, about, and at most: for batch_policy slo, and for
    models that draft, loading them included. Of a slow model only small batches are measured; the rest follows from
    requests."""
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
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _with_options(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Keep the options of the tier's own engine as they are; those of another one are unknown fields."""
        if not isinstance(data, dict):
            return handler(data)
        if "engine" not in data and str(data.get("model", "")).endswith(".gguf"):
            data = {**data, "engine": "llamacpp"}
        engine = data.get("engine", cls.model_fields["engine"].default)
        if not isinstance(engine, str) or engine in cls.model_fields:
            return handler(data)
        options = data.get(engine, {})
        tier = handler({name: value for name, value in data.items() if name != engine or not isinstance(options, dict)})
        tier._options.update(options)
        return tier

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the engine, unread."""
        return self._options

    def with_options(self, **options: Any) -> Self:
        """The tier with other values of some options of its engine."""
        changed = self.model_copy(deep=True)
        changed._options.update(options)
        return changed

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.adapter or self.model).name.removesuffix(".gguf") or self.name
