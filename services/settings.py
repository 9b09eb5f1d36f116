"""The settings: what a mesh file may hold, and what every service reads from the environment.

`services.mesh_file` reads mesh files. Only this module reads the environment. A process with a bad value ends at boot and
names the field.
"""

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.domain.early_checks import EarlyCheck
from services.domain.errors import FieldProblem, invalid, shortened
from services.domain.mesh_view import PULL_INTERVAL_S
from services.domain.plans import JudgeUnavailable, Plan, Provenance, TierPlan
from services.domain.requests import (
    MAX_SLO_MARKER_CHARS,
    MAX_SLO_NAME_CHARS,
    MAX_SLO_PHASES,
    Slo,
    SloFallback,
    SloPhase,
)
from services.domain.stages.bidding import MAX_TRANSFERS
from services.field_problems import field_problems, joined

MAX_PORT = 65_535
DEFAULT_KV_TOKENS = 32_768  # where no GPU's memory decides
DEFAULT_STEP_TOKENS = 512
MAX_PROCESSES = 1024  # of one kind in a mesh file: more is a typing error, and would exhaust the machine
DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xpu")  # torch's names of what computes; a number may follow: cuda:1
_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _known_device(device: str) -> str:
    name, colon, number = device.partition(":")
    if name not in DEVICES or (colon and not number.isdecimal()):
        raise ValueError(f"unknown device '{device}': must be one of {', '.join(DEVICES)}, or with a number: cuda:1")
    return device


Device = Annotated[str, AfterValidator(_known_device)]


class SettingsError(Exception):
    """Bad settings. The message names every bad field; `problems` lists the same one by one."""

    def __init__(self, message: str, problems: Sequence[FieldProblem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (FieldProblem("", message),)


class SimulatedMeshEngine(BaseModel):
    """The simulated engine's latency model: T(step) = overhead + token * tokens + context * context tokens."""

    model_config = _FROZEN

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

    model_config = _FROZEN

    endpoint: str = ""
    """Base URL of a running server. Empty: each worker starts its own server and restarts it when it fails."""
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

    model_config = _FROZEN

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

    model_config = _FROZEN

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

    model_config = _FROZEN

    after_tokens: int = Field(ge=1)
    """How many tokens the answer has when it is scored."""
    reject_below: float = Field(ge=0, le=100)
    """With a lower score, the answer is cancelled and the request escalates."""


class MeshTier(BaseModel):
    """One tier of the cascade."""

    model_config = _FROZEN

    name: str
    """Name of the tier: 1 to 63 characters of a-z, 0-9, -, _ and `.`."""
    model: str = ""
    """A folder in Hugging Face format (a relative path is resolved against the mesh file's folder), or a model's id at the
    hub. For engine openai, the model's name at the endpoints. Not required for the simulated engine."""
    served_model_name: str = ""
    """The model's name in the API. Empty: the folder's name, or the tier's name without a model."""
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
    its start, and an SGLang worker its server's; to SGLang, which forms its steps itself, it is a prediction. prefill_first
    is for torch and simulated engines."""
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
        return self.served_model_name or Path(self.model).name or self.name


class MeshScorer(BaseModel):
    """One scorer of the judge."""

    model_config = _FROZEN

    name: str
    """Its name in plans and requests."""
    kind: Literal[
        "judge-model", "llm", "confidence", "exact", "reward", "json-schema", "code", "consistency", "combined"
    ]
    """judge-model: a model that reads (prompt, answer) in one pass; llm: a language model asked for a grade;
    confidence: the token logprobs of the answer; exact: comparison with an expected answer; reward: a reward model that
    SGLang serves; json-schema: whether the answer fits a schema; code: whether the answer's program passes tests;
    consistency: how many further samples agree; combined: a logistic model over other scorers."""
    model: str = ""
    """judge-model: a folder in Hugging Face format, or an id at the hub; reward: the same, of which only tokenizer and
    configuration are read. llm: the model's name at the endpoint."""
    endpoint: str = ""
    """llm: base URL of an OpenAI-compatible API, including `/v1`. reward: base URL of the SGLang server."""
    tier: str = ""
    """llm: the tier of this mesh whose model grades the answers; replaces endpoint and model. consistency: the tier that is
    sampled; empty: the one that gave the answer."""
    api_key_env: str = ""
    """llm or reward at an endpoint: name of the environment variable that holds the key. Empty: no key."""
    calibration: str = ""
    """Calibration file; combined: the file with the fitted weights. Empty: judge-model uses calibration.json in its model's
    folder, the others use none."""
    compare: Literal["text", "number", "final-answer"] = "final-answer"
    """exact, consistency: how two answers are compared: the text, the last number, or the text after the last `Answer:`."""
    tolerance: float = Field(default=1e-9, ge=0, lt=1)
    """exact with `compare: number`: largest relative difference of numbers that count as equal."""
    statistic: Literal["mean", "min"] = "mean"
    """confidence: the mean or the least logprob of the answer's tokens."""
    rubric: str = Field(default="", max_length=10_000)
    """llm: what to look at when grading; added to the task."""
    pairwise: bool = False
    """llm: compare the answer with the reference answer, in both orders, instead of grading it."""
    thinking_tokens: int = Field(default=0, ge=0, le=65_536)
    """llm: tokens that a model may use to think (until `</think>`) before its grade."""
    extra_body: dict[str, Any] = {}
    """llm at an endpoint: further fields of its requests, such as `chat_template_kwargs: {enable_thinking: false}`."""
    schema_file: str = ""
    """json-schema: file with the schema that all answers must fit. Empty: the schema of the request's structured output."""
    samples: int = Field(default=5, ge=1, le=64)
    """consistency: further answers drawn for each answer."""
    temperature: float = Field(default=0.7, ge=0.01, le=2)
    """consistency: temperature of the samples."""
    max_tokens: int = Field(default=512, ge=1)
    """consistency: largest length of a sample, in tokens."""
    scorers: tuple[str, ...] = ()
    """combined: names of the scorers that it combines."""
    timeout_s: float = Field(default=8.0, gt=0)
    """llm, reward, consistency: timeout of one request. code: time that a program and its tests may take. At most the
    router's judge_timeout_s."""
    concurrency: int = Field(default=8, ge=1)
    """llm, reward, consistency, code: concurrent requests or programs."""
    tier_share: float = Field(default=0.25, gt=0, le=1)
    """llm of a tier, consistency: fraction of the tier's max_running that grades and samples may use at once, over all
    judges; each judge may use at least one slot of each worker."""


class MeshJudge(BaseModel):
    """The judge."""

    model_config = _FROZEN

    replicas: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Judge processes."""
    scorers: tuple[MeshScorer, ...] = (MeshScorer(name="confidence", kind="confidence"),)
    """The available scorers. Default: the confidence of the answer's tokens, which needs no model."""
    default_scorer: str = ""
    """The scorer of requests that name none. Empty: the first."""
    guards: tuple[Literal["truncated", "repeated"], ...] = ("truncated", "repeated")
    """Answers that score 0 without a scorer: `truncated`, cut off at max_output_tokens or the end of the context; `repeated`,
    the model got stuck in a loop. Empty answers and answers of a wrong form always score 0."""
    max_batch: int = Field(default=32, ge=1)
    """Answers scored in one forward pass."""
    max_batch_tokens: int = Field(default=4096, ge=64)
    """Tokens in one forward pass, padding included."""
    max_queued: int = Field(default=512, ge=1)
    """Answers of one scorer that may be scored or waiting at once. Further ones are refused, and so is an answer that could
    not be scored before its caller's deadline."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each judge."""
    device: Device = "cpu"
    """Device that runs the judge model."""


MAX_ROUTER_PROCESSES = 64  # cores of a large machine: each process keeps at most one busy


class MeshRouter(BaseModel):
    """The routers."""

    model_config = _FROZEN

    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Routers, each with ports of its own."""
    processes: int = Field(default=1, ge=1, le=MAX_ROUTER_PROCESSES)
    """Processes of each router, which share its ports: one for each core that the router may use. They share the router's
    limits evenly (max_active, max_waiting, max_connections, judge_concurrency, trace_per_s); each gets at least one place."""
    grpc_port: int = Field(default=50051, ge=0, le=MAX_PORT)
    """gRPC port of the first router; the next routers use the next ports. 0: any free port."""
    http_port: int = Field(default=8000, ge=0, le=MAX_PORT)
    """The same for the OpenAI-compatible API."""
    admin_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """The same for the administrative listener."""
    max_active: int = Field(default=256, ge=1)
    """Requests that one router processes at once."""
    max_waiting: int = Field(default=512, ge=0)
    """Requests that may wait in the admission queue; further ones fail with RESOURCE_EXHAUSTED."""
    default_deadline_s: float = Field(default=600.0, gt=0)
    """Deadline of requests that set none."""
    write_timeout_s: float = Field(default=30.0, gt=0)
    """A request whose client does not read for this long is cancelled; the same holds for a router's call to a worker."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout for reading the body of an HTTP request; then the status is 408."""
    keepalive_timeout_s: float = Field(default=75.0, gt=0)
    """An HTTP connection is closed after this long without complete request headers, whether it is idle or slow."""
    connection_idle_s: float = Field(default=600.0, gt=0)
    """A gRPC connection without calls is closed after this long; clients reconnect by themselves."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections to one router, counted separately for gRPC and HTTP; further ones are closed at once."""
    judge_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of scoring one answer, retries included."""
    judge_concurrency: int = Field(default=64, ge=1)
    """Concurrent score requests of one router; further ones wait for at most half of judge_timeout_s."""
    judge_open_s: float = Field(default=1.0, gt=0)
    """A judge that timed out three times in a row gets no requests for this long (circuit breaker); then one request probes
    it."""
    flag_below: float | None = Field(default=None, ge=0, le=100)
    """Answers of the last tier (and of a tier that a request names) are judged at their end, too, and flagged to the client
    and counted if they score less than this. The end of a reply then waits for the judge, its tokens do not. Empty: these
    answers are not judged."""
    burst_window_s: float = Field(default=600.0, ge=10, le=86_400)
    """Seconds over which the mean quality holds while thresholds give way, where the plan has a burst ladder."""
    score_predictor: str = ""
    """File of `penstock predictor`, which predicts from a prompt the score of each tier's answer, for skip_below of tiers.
    A relative path is resolved against the mesh file's folder. Empty: no tier is passed over by prediction."""
    worker_silence_s: float = Field(default=15.0, gt=0)
    """A worker that sends nothing on a stream for this long counts as failed for that request."""
    heartbeat_s: float = Field(default=5.0, ge=0.05)
    """A gRPC stream that has been idle for this long gets a heartbeat, so that clients can tell a slow answer from a stuck
    router; a stream over HTTP gets a comment, so that proxies do not cut it."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins, such as https://chat.example, may call the OpenAI-compatible API from a browser. `*`: all.
    Empty: none."""
    tier_wait_s: float = Field(default=30.0, ge=0)
    """How long a request waits for an instance of the last tier when there is none; other tiers are skipped instead."""
    ejection_s: float = Field(default=2.0, ge=0)
    """How long an instance that failed is ejected: tried only after all others."""
    max_attempts: int = Field(default=8, ge=1)
    """Attempts of one request at one tier, failovers included."""
    max_deaths: int = Field(default=2, ge=1)
    """A request is given up (POISON_REQUEST) when this many workers died while they ran it: it may be the cause. A worker
    that had generated 16 tokens of the reply before it died is not counted."""
    max_refusals: int = Field(default=50, ge=1)
    """How often workers of one tier may refuse a request, because they are full or draining, before it is given up. If they
    are full, the error carries a retry delay. A worker that refused gets no requests for up to a second."""
    trace_share: float = Field(default=0.01, ge=0, le=1)
    """Share of requests that are traced. 1: all."""
    trace_per_s: float = Field(default=1.0, ge=0, le=1000)
    """Traces per second in addition to trace_share, with bursts of ten seconds' worth. It applies separately to requests
    in general, to requests whose clients ask for a trace, and to untraced requests that failed or were slow."""
    trace_slow_s: float = Field(default=30.0, gt=0)
    """An untraced request that took longer than this is slow."""
    kept_requests: int = Field(default=0, ge=0, le=1_000_000)
    """Of how many last requests of the mesh Redis keeps arrival time, prompt tokens, output tokens and answering tier, for
    `penstock export-trace`: no text, no tenant. About 100 bytes each. 0: of none."""

    def share(self, index: int, count: int) -> "MeshRouter":
        """The limits of one of `count` processes of a router; they add up to the router's. index: from 0."""
        shares = {name: share_of(getattr(self, name), index, count) for name in _DIVIDED}
        divided = {name: max(_DIVIDED[name], share) for name, share in shares.items()}
        return self.model_copy(update={**divided, "trace_per_s": self.trace_per_s / count})


_DIVIDED = {
    "max_active": 1,
    "max_waiting": 0,
    "max_connections": 1,
    "judge_concurrency": 1,
}  # and the least of a process


def share_of(total: int, index: int, count: int) -> int:
    """The share of the process `index`, from 0, of `count` in a total: shares differ by one at most and add up to it."""
    return total // count + (index < total % count)


class MeshReplan(BaseModel):
    """Detection of workload drift, and planning again. The files are those of `penstock plan`; relative paths are resolved
    against the mesh file's folder."""

    model_config = _FROZEN

    enabled: bool = False
    """Routers sample finished requests (lengths and scores, no text), and the planner compares them with its plan. Needs the
    files below."""
    cluster: str = ""
    """Cluster file: the hardware that a plan may use."""
    models: str = ""
    """Models file; it has the same tiers as this file."""
    trace: str = ""
    """Trace file: the pattern of arrivals, scaled to the measured rate."""
    quality: str = ""
    """Judged prompts: they supply the values that sampled requests lack, such as scores of tiers they did not reach."""
    min_quality: float | None = Field(default=None, ge=0, le=100)
    """Plan for the lowest latency with at least this mean score; set either this or max_latency_s."""
    max_latency_s: float | None = Field(default=None, gt=0)
    """Plan for the highest quality with at most this p95 latency of the slowest tier."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs to use at most. None: all of the cluster."""
    requests: int = Field(default=500, ge=20)
    """Requests to plan for, or all of the trace if it has fewer. A p95 needs 20."""
    window_s: float = Field(default=300.0, gt=0)
    """Length of the windows in which requests are sampled and compared."""
    sample: int = Field(default=50, ge=1)
    """Requests that each router samples per window."""
    rate_change: float = Field(default=0.3, gt=0)
    """A relative change of the request rate by this much counts as drift, unless noise explains it."""
    length_change: float = Field(default=0.3, gt=0)
    """The same for token counts."""
    score_change: float = Field(default=6.0, gt=0)
    """The same for mean scores, in points."""
    confirm_windows: int = Field(default=2, ge=1)
    """Consecutive windows that must show a change before it counts as drift."""
    cooldown_windows: int = Field(default=2, ge=0)
    """Windows after planning again in which nothing counts as drift."""


class MeshPlanner(BaseModel):
    """The planner."""

    model_config = _FROZEN

    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Planner processes."""
    judge_unavailable: Literal["escalate", "accept"] = "escalate"
    """What routers do with answers that cannot be scored: escalate to the last tier, or accept them."""
    max_instances: int = Field(default=64, ge=1)
    """Largest number of instances of a tier in a plan, unless this file itself has more."""
    replan: MeshReplan = MeshReplan()
    """Planning again when the workload drifts: see below."""


class MeshTenant(BaseModel):
    """One tenant. A limit that is not set does not exist."""

    model_config = _FROZEN

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Name of the tenant: 1 to 63 characters of a-z, 0-9, -, _ and `.`."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests (choices of a request count one by one) in any 60 s, at all routers together."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and replies in any 60 s, at all routers together. A request reserves an estimate of its prompt and
    its max_tokens, or 256; its reply's own number counts from its end."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests at once, at all routers together."""
    models: tuple[str, ...] = ()
    """Models that its requests may name: `cascade` and tiers. Empty: all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest max_tokens of a request; also the limit of requests that set none."""
    max_n: int | None = Field(default=None, ge=1)
    """Largest number of choices of one HTTP request, prompts times n."""
    max_priority: int | None = Field(default=None, ge=-100, le=100)
    """Highest priority that its requests may have."""
    slo: bool = True
    """Whether its requests may ask for latencies."""
    ignore_eos: bool = False
    """Whether its requests may set ignore_eos: their replies then always have max_tokens. For benchmarks."""
    slo_classes: tuple[str, ...] = ()
    """Classes of the mesh's `slo.classes` that its requests may name; they may then ask for no latencies of their own.
    Empty: all, and their own."""


class MeshAccess(BaseModel):
    """Who may use the mesh."""

    model_config = _FROZEN

    keys: str = ""
    """Key file, written by `penstock keys`; a relative path is resolved against the mesh file's folder. Empty: requests need
    no key, and routers listen on loopback only."""
    tenants: tuple[MeshTenant, ...] = ()
    """The tenants that keys belong to: see below."""


class MeshTls(BaseModel):
    """Certificates."""

    model_config = _FROZEN

    folder: str = ""
    """Folder of the mesh's own certificates, written by `penstock certs`; a relative path is resolved against the mesh
    file's folder. With it, services accept each other and administrators by their certificates only, and clients use TLS.
    Empty: no TLS."""
    client_certificate: str = ""
    """PEM file of the certificate, with its chain, that clients of the routers see. Empty: the router's own."""
    client_key: str = ""
    """PEM file of its private key."""


class MeshStages(BaseModel):
    """Length stages: how often workers check their stage, and how many requests migrate at once."""

    model_config = _FROZEN

    look_s: float = Field(default=0.5, gt=0)
    """Interval at which a worker checks which stage it serves and compares its load with the others."""
    refine_s: float = Field(default=5.0, gt=0)
    """Interval between two refinements of a worker's length boundary."""
    max_transfers: int = Field(default=MAX_TRANSFERS, ge=2)
    """Requests that one worker sends and receives at once."""
    shared_memory: bool = True
    """Whether workers of one host move KV through memory that they share; otherwise in messages, as between hosts."""
    kv_bandwidth_gb_per_s: float | None = Field(default=None, gt=0, lt=math.inf)
    """At which rate KV moves between two workers. None: each worker measures it, when it meets the first other of its tier,
    and with every move."""
    bid_timeout_s: float = Field(default=0.5, gt=0)
    """How long a router waits for the first bid; those that come 50 ms after it or later are ignored."""
    turn_timeout_s: float = Field(default=10.0, gt=0)
    """A request whose transfer has not started within this time after a won bid stays where it is, unless it is starving:
    then its worker sends it next."""


class MeshSloPhase(BaseModel):
    """A phase of a reply with a pace of its own."""

    model_config = _FROZEN

    time_per_output_token_s: float = Field(gt=0, lt=math.inf)
    """Seconds per output token."""
    from_output_token: int = Field(default=0, ge=0)
    """The output token with which the phase begins."""
    after_marker: str = Field(default="", max_length=MAX_SLO_MARKER_CHARS)
    """The phase begins after the first occurrence of this text instead, such as `</think>`."""


class MeshSloClass(BaseModel):
    """A class of latency objectives, which requests name in place of objectives of their own. Without any objective, its
    requests are served as best effort."""

    model_config = _FROZEN

    time_to_first_token_s: float | None = Field(default=None, gt=0, lt=math.inf)
    """Seconds from the router's receiving a request to the first token of its answer."""
    time_per_output_token_s: float | None = Field(default=None, gt=0, lt=math.inf)
    """Seconds per output token, for the whole answer."""
    phases: tuple[MeshSloPhase, ...] = Field(default=(), max_length=MAX_SLO_PHASES)
    """Phases with different paces, in order, in place of `time_per_output_token_s`."""
    fallback: Literal["best_effort", "decline"] | None = None
    """What follows where no worker can keep the objectives. None: the mesh's `slo.fallback`."""

    def slo(self) -> Slo:
        """The objectives."""
        phases = tuple(SloPhase(p.from_output_token, p.time_per_output_token_s, p.after_marker) for p in self.phases)
        if self.time_per_output_token_s is not None:
            phases = (SloPhase(0, self.time_per_output_token_s),)
        return Slo(self.time_to_first_token_s, phases, fallback=SloFallback(self.fallback) if self.fallback else None)


class MeshSlo(BaseModel):
    """Latency objectives (SLOs) of requests. Workers keep them in tiers whose `batch_policy` is `slo`."""

    model_config = _FROZEN

    classes: dict[Annotated[str, Field(min_length=1, max_length=MAX_SLO_NAME_CHARS)], MeshSloClass] = {}
    """Named classes: `{interactive: {time_to_first_token_s: 2, time_per_output_token_s: 0.05}, batch: {}}`."""
    fallback: Literal["best_effort", "decline"] = "best_effort"
    """What follows where no worker can keep a request's objectives: it is served as best effort, or ends as declined."""
    max_hops: int = Field(default=3, ge=0)
    """Other instances of a tier that are tried after one has declined a request."""
    hop_time_s: float = Field(default=0.5, ge=0)
    """No further instance of a tier is tried later than this after the first one."""

    @property
    def tightest_tpot_s(self) -> float | None:
        """Seconds per output token of the tightest class; None where no class has a pace."""
        paces = [phase.time_per_output_token_s for one in self.classes.values() for phase in one.slo().phases]
        return min(paces, default=None)

    def resolved(self, slo: Slo, path: str = "slo") -> Slo:
        """The objectives of a request, with those of its class and a fallback. path: of the request's field.

        Raises:
            InvalidRequest: There is no such class; names the field.
        """
        objectives = slo
        if slo.name:
            if slo.name not in self.classes:
                known = ", ".join(sorted(self.classes)) or "none"
                raise invalid(f"{path}.name", f"no class '{shortened(slo.name)}' in the mesh file, which has: {known}")
            objectives = self.classes[slo.name].slo()
        fallback = slo.fallback or objectives.fallback or SloFallback(self.fallback)
        return replace(objectives, name=slo.name, fallback=fallback)


def processes_problem(processes: int, router: MeshRouter) -> str:
    """Why a router cannot have so many processes; empty where it can."""
    most = router.max_active
    return f"{processes}, but router.max_active is {most}: each process needs a place" if processes > most else ""


class MeshFile(BaseModel):
    """A mesh file describes the processes of a mesh. `penstock up` and docker compose both use it."""

    model_config = _FROZEN

    name: str = Field(default="penstock", min_length=1, max_length=128)
    """Name of the mesh: the prefix of its keys in Redis, so that several meshes can share one Redis."""
    redis_url: str = ""
    """URL of a Redis. Empty: REDIS_URL from the environment; without it `penstock up` starts a Redis."""
    tiers: tuple[MeshTier, ...]
    """The tiers, from the cheapest to the most expensive."""
    judge: MeshJudge = MeshJudge()
    """The judge: see below. Default: answers are scored by their confidence; a mesh of one tier, whose answers are always
    accepted, has no judge process."""
    router: MeshRouter = MeshRouter()
    """The routers: see below."""
    planner: MeshPlanner = MeshPlanner()
    """The planner: see below."""
    stages: MeshStages = MeshStages()
    """Length stages: see below."""
    slo: MeshSlo = MeshSlo()
    """Latency objectives of requests: see below."""
    access: MeshAccess = MeshAccess()
    """API keys and tenants: see below."""
    tls: MeshTls = MeshTls()
    """Certificates: see below."""

    @model_validator(mode="before")
    @classmethod
    def _without_judge_for_one_tier(cls, data: Any) -> Any:
        if isinstance(data, dict) and "judge" not in data and isinstance(tiers := data.get("tiers"), list | tuple):
            return data | ({"judge": {"replicas": 0}} if len(tiers) == 1 else {})
        return data

    @model_validator(mode="after")
    def _tenants_name_known_classes(self) -> "MeshFile":
        for at, tenant in enumerate(self.access.tenants):
            for name in tenant.slo_classes:
                if name not in self.slo.classes:
                    raise ValueError(f"access.tenants.{at}.slo_classes: no class '{name}' in slo.classes")
        return self

    def router_share(self, index: int, count: int) -> "MeshFile":
        """This file as one of `count` processes of a router follows it. index: from 0."""
        replan = self.planner.replan
        sampled = replan.model_copy(update={"sample": max(1, share_of(replan.sample, index, count))})
        planner = self.planner.model_copy(update={"replan": sampled})
        return self.model_copy(update={"router": self.router.share(index, count), "planner": planner})

    def plan(self, input_digest: str) -> Plan:
        """The plan that this file describes."""
        tiers = tuple(
            TierPlan(
                t.name,
                t.served_name,
                t.threshold,
                t.workers,
                skip_below=t.skip_below,
                early_checks=tuple(EarlyCheck(c.after_tokens, c.reject_below) for c in t.early_checks),
            )
            for t in self.tiers
        )
        return Plan(
            revision=0,
            tiers=tiers,
            judge_unavailable=JudgeUnavailable(self.planner.judge_unavailable),
            provenance=Provenance("mesh-file", input_digest=input_digest),
        )

    def tier(self, name: str) -> MeshTier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise SettingsError(
            f"tier: no tier '{name}' in the mesh file, which has {', '.join(t.name for t in self.tiers)}"
        )


class ServiceSettings(BaseSettings):
    """Settings that every service reads from environment variables with the prefix PENSTOCK_."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", frozen=True, extra="ignore", use_attribute_docstrings=True, env_ignore_empty=True
    )

    mesh_file: Path = Path("mesh.yaml")
    """The mesh file."""
    tier: str = ""
    """The tier that a worker serves; required for workers."""
    worker_index: int = Field(default=0, ge=0)
    """Index of a worker in its tier: selects the GPUs and the port of its SGLang server."""
    instance_id: str = ""
    """Unique name of this process in the mesh. Empty: derived from role, tier, host and process id."""
    sglang_endpoint: str = ""
    """URL of this worker's SGLang server, if a tier has several. Empty: the URL in the mesh file."""
    bind_host: str = "127.0.0.1"
    """The address that servers listen on."""
    advertise_host: str = ""
    """The address at which others reach this process. Empty: bind_host, or the host's name if that is 0.0.0.0."""
    grpc_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the gRPC server; 0: any free port."""
    admin_host: str = "127.0.0.1"
    """The address that the administrative listener listens on: status, traces, moves, plans, draining and reflection."""
    admin_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the administrative listener; 0: any free port."""
    http_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the router's OpenAI-compatible API; 0: any free port."""
    open_access: bool = False
    """Whether to listen on other addresses than loopback although callers need neither an API key nor a certificate. For
    networks that only the mesh and its operators can reach."""
    metrics_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the Prometheus metrics; 0: any free port."""
    router_processes: int | None = Field(default=None, ge=1, le=MAX_ROUTER_PROCESSES)
    """Number of processes of a router. Empty: router.processes of the mesh file."""
    tls_folder: str = ""
    """Folder of this process's certificates. Empty: tls.folder of the mesh file."""
    keys_file: str = ""
    """Key file. Empty: access.keys of the mesh file."""
    redis_url: str = ""
    """URL of the Redis. Empty: REDIS_URL, then the mesh file's."""
    lease_s: float = Field(default=3.0, gt=0)
    """Lease of an instance. When it expires, the instance gets new requests only if no other instance can take them, and is
    removed unless it responds to a probe."""
    publish_interval_s: float = Field(default=0.25, gt=0)
    """Shortest interval between two updates of an instance's load; without changes it is published every third of a lease."""
    pull_interval_s: float = Field(default=PULL_INTERVAL_S, gt=0)
    """Average interval at which a process reads the state of the mesh. Workers read that of their tier every
    `stages.look_s`."""
    drain_s: float = Field(default=30.0, ge=0)
    """Grace period for running requests at shutdown."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe message that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Log format: text is for people, json for log collectors; both contain trace ids."""
    frame_interval_ms: float = Field(default=20.0, ge=0)
    """How long a worker may gather tokens into one frame; the first token is sent at once."""
    frame_tokens: int = Field(default=32, ge=1)
    """Largest number of tokens in one frame."""
    trace_keep: int = Field(default=500, ge=0)
    """Traces kept in Redis for `penstock trace`; 0 keeps none."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Read the environment; `values` take precedence.

        Raises:
            SettingsError: A value is bad; the message names every bad field.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            problems = [FieldProblem(f"PENSTOCK_{p.field.upper()}", p.problem) for p in field_problems(error, cls)]
            raise SettingsError(joined(problems), problems) from None

    def state_url(self, mesh: MeshFile) -> str:
        """The URL of the Redis.

        Raises:
            SettingsError: Neither the environment nor the mesh file gives one.
        """
        url = self.redis_url or os.environ.get("REDIS_URL", "") or mesh.redis_url
        if not url:
            raise SettingsError("redis_url: neither PENSTOCK_REDIS_URL, REDIS_URL nor the mesh file names a Redis")
        return url

    @property
    def reachable_host(self) -> str:
        """The host in the addresses that this process tells others."""
        return self.advertise_host or (socket.gethostname() if self.bind_host == "0.0.0.0" else self.bind_host)

    @property
    def reachable_admin_host(self) -> str:
        """The host in the address of the administrative listener that this process tells others."""
        return (self.advertise_host or socket.gethostname()) if self.admin_host == "0.0.0.0" else self.admin_host

    def processes_of_router(self, mesh: MeshFile) -> int:
        """How many processes each router has.

        Raises:
            SettingsError: more than it has places for requests; names PENSTOCK_ROUTER_PROCESSES.
        """
        if self.router_processes is None:
            return mesh.router.processes
        if problem := processes_problem(self.router_processes, mesh.router):
            fault = FieldProblem("PENSTOCK_ROUTER_PROCESSES", problem)
            raise SettingsError(joined([fault]), [fault])
        return self.router_processes

    def certificate_folder(self, mesh: MeshFile) -> Path | None:
        """The folder of the mesh's certificates; None without TLS."""
        path = self.tls_folder or mesh.tls.folder
        return self.resolve(path) if path else None

    def key_file(self, mesh: MeshFile) -> Path | None:
        """The key file; None where requests need no key."""
        path = self.keys_file or mesh.access.keys
        return self.resolve(path) if path else None

    def resolve(self, path: str) -> Path:
        """A path from the mesh file, resolved against its folder if it is relative."""
        return Path(path) if Path(path).is_absolute() else self.mesh_file.resolve().parent / path


def environment_value(name: str) -> str | None:
    """The environment variable that a setting names (such as an API key); None if it is not set."""
    return os.environ.get(name)
