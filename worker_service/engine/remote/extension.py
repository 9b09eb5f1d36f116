"""Endpoints of OpenAI's API as an entry point: `openai`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import Field

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings, environment_value
from penstock.types.problems import FieldProblem
from penstock.worker_service.engine.extension import EngineExtension, EngineSite

if TYPE_CHECKING:
    from penstock.worker_service.engine.interface import Engine
    from penstock.worker_service.engine.remote.engine import RemoteEngine

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


class OpenAi(EngineExtension):
    """The endpoints of OpenAI's API behind each worker of a tier: vLLM, llama.cpp, Ollama, a hosted API, another mesh."""

    tier_fields = frozenset({"max_context_tokens", "max_queued", "max_running"})
    gives_logprobs = None

    endpoints: tuple[str, ...] = Field(default=(), max_length=16)
    """Base URLs with /v1, which serve the same model. Requests are sent to them in turn; one that fails or is full is tried
    after the others for 5 s."""
    key_env: str = ""
    """Environment variable with the API key, which is sent to every endpoint. Empty: no key."""
    extensions: tuple[RemoteExtension, ...] = ()
    """Fields that the endpoints take in addition to those that all have. Requests that need another one are refused, or
    escalate. vLLM takes all of them."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The endpoints' name of the largest length of a reply. Newer models of OpenAI need max_completion_tokens."""
    silence_s: float = Field(default=60.0, gt=0)
    """A reply whose endpoint sends nothing for so long has failed; the first token counts, too."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long a worker waits at its start for an endpoint to answer."""

    def models(self, tier: MeshTier) -> Iterator[tuple[str, str]]:
        yield from ()  # the model is the endpoints'

    def shape(self, tier: MeshTier) -> ReplicaShape | None:
        return None

    def problems(self, tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
        if not tier.model:
            yield FieldProblem("model", "missing: the openai engine needs the model's name at the endpoints")
        if not self.endpoints:
            example = "http://127.0.0.1:8001/v1"
            yield FieldProblem("openai.endpoints", f"missing: the openai engine needs a base URL, such as {example}")
        for j, endpoint in enumerate(self.endpoints):
            parts = urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                yield FieldProblem(f"openai.endpoints[{j}]", "must be http://HOST:PORT/v1 or https://HOST/v1")
            elif parts.username or parts.password:
                problem = "must hold no password: name a variable with the key in key_env"
                yield FieldProblem(f"openai.endpoints[{j}]", problem)

    def host_problems(self, tier: MeshTier, settings: ServiceSettings) -> Iterator[FieldProblem]:
        if self.key_env and environment_value(self.key_env) is None:
            yield FieldProblem("openai.key_env", f"the environment variable {self.key_env} is not set")

    async def logprobs_now(self, tier: MeshTier) -> bool | None:
        from penstock.worker_service.engine.interface import Capability, EngineUnusable

        engine = self.model_copy(update={"start_timeout_s": 0.0})._engine(tier)
        try:
            await engine.start()
        except EngineUnusable:
            return None
        await engine.close()
        return Capability.LOGPROBS in engine.info.capabilities

    def build(self, site: EngineSite) -> "Engine":
        return self._engine(site.tier)

    def _engine(self, tier: MeshTier) -> "RemoteEngine":
        from penstock.worker_service.engine.remote.engine import RemoteEngine

        key = environment_value(self.key_env) if self.key_env else ""
        if key is None:
            problem = f"the environment variable {self.key_env} is not set"
            raise SettingsError(f"tiers: {tier.name}: openai.key_env: {problem}")
        return RemoteEngine(tier, self, key)
