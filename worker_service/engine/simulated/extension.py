"""The simulated engine as an entry point."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.extensions.engines import ENGINE_FIELDS
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.common import DEFAULT_KV_TOKENS, DEFAULT_STEP_TOKENS
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.worker_service.engine.extension import EngineExtension, EngineSite

if TYPE_CHECKING:
    from penstock.worker_service.engine.interface import Engine


class Simulated(EngineExtension):
    """The simulated engine's latency model: T(step) = overhead + (token * tokens + context * context tokens) / tp."""

    tier_fields = ENGINE_FIELDS - {"adapter", "device", "dtype", "measuring_s", "speculation", "tool_format"}
    batch_policies = ("decode_first", "prefill_first", "slo")

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
    load_s: float = Field(default=0.0, ge=0)
    """Seconds that loading the model takes."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: tokens take so many times less, and the KV cache holds so many times more."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallelism: the KV cache holds so many times more."""

    def models(self, tier: MeshTier) -> Iterator[tuple[str, str]]:
        yield from ()

    def shape(self, tier: MeshTier) -> ReplicaShape | None:
        return ReplicaShape(self.tp, self.pp, tier.gpu_type)

    def in_shape(self, tier: MeshTier, shape: ReplicaShape) -> MeshTier:
        if shape != ReplicaShape(shape.tp, shape.pp, shape.gpu):
            raise SettingsError(f"the simulated engine has no workers of the shape {shape}")
        return tier.model_copy(update={"gpu_type": shape.gpu}).with_options(tp=shape.tp, pp=shape.pp)

    def build(self, site: EngineSite) -> "Engine":
        from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_engine
        from penstock.worker_service.scheduling.policies import PolicyName

        tier = site.tier
        options = SimulatedEngineOptions(
            name=tier.served_name,
            latency=StepLatencyModel.linear(
                self.overhead_ms * 1e-3, self.token_us * 1e-6 / self.tp, self.context_token_ns * 1e-9 / self.tp
            ),
            reply_tokens=self.reply_tokens,
            kv_tokens=(tier.kv_tokens or DEFAULT_KV_TOKENS) * self.tp * self.pp,
            kv_block_tokens=tier.kv_block_tokens,
            max_running=tier.max_running,
            max_queued=tier.max_queued,
            max_step_tokens=tier.max_step_tokens or DEFAULT_STEP_TOKENS,
            max_context_tokens=tier.max_context_tokens or self.max_context_tokens,
            batch_policy=PolicyName(tier.batch_policy),
            best_effort_reserve=tier.best_effort_reserve,
        )
        return simulated_engine(options, site.hold, load_s=self.load_s, progress=site.progress)
