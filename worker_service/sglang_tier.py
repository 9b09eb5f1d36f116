"""The SGLang engine of a tier, as the mesh file and the settings of the worker say."""

import sys
from pathlib import Path

from services.field_problems import SettingsError
from services.mesh_schema import DEFAULT_KV_TOKENS, DEFAULT_STEP_TOKENS, MeshTier
from services.model_folder import model_folder
from services.settings import ServiceSettings, environment_value
from worker_service.devices import worker_device
from worker_service.engine.loop import OutputCoalescing
from worker_service.engine.sglang import SglangEngine, SglangEngineOptions
from worker_service.engine.sglang.adapter import adapter_problem
from worker_service.engine.sglang.launch import ServerShape, gpus_of

GIB = 1 << 30


def sglang_engine(
    tier: MeshTier, settings: ServiceSettings, hold: OutputCoalescing | None, tightest_tpot_s: float | None
) -> SglangEngine:
    """Create the engine, without starting it.

    Raises:
        SettingsError: The model or the adapter cannot be found, or there are too few GPUs.
    """
    server, index = tier.sglang, settings.worker_index
    endpoint, adapter = settings.sglang_endpoint or server.endpoint, _adapter(tier, settings)
    return SglangEngine(
        SglangEngineOptions(
            folder=model_folder(settings, tier.model),
            name=tier.served_name,
            endpoint=endpoint,
            launch=None if endpoint else _server_shape(tier, settings, adapter),
            adapter=adapter,
            port=server.port + index if server.port else 0,
            max_requests=tier.max_running * (1 if endpoint else server.dp) + tier.max_queued,
            max_context_tokens=tier.max_context_tokens,
            start_timeout_s=server.start_timeout_s,
            gone_s=server.gone_s,
            hold=hold,
            tool_format=tier.tool_format,
            model=tier.model,
            keeps_slos=tier.batch_policy == "slo",
            tightest_tpot_s=tightest_tpot_s,
        )
    )


def _adapter(tier: MeshTier, settings: ServiceSettings) -> Path | None:
    """The folder of the tier's LoRA adapter; None if it has none.

    Raises:
        SettingsError: It is no LoRA adapter.
    """
    if not tier.sglang.adapter:
        return None
    folder = model_folder(settings, tier.sglang.adapter)
    if problem := adapter_problem(folder):
        raise SettingsError(f"tiers: {tier.name}: sglang.adapter: {problem}")
    return folder


def _server_shape(tier: MeshTier, settings: ServiceSettings, adapter: Path | None) -> ServerShape:
    """The shape of the SGLang server that this worker starts."""
    server, each = tier.sglang, tier.sglang.tp * tier.sglang.pp * tier.sglang.dp
    on_cpu = tier.device == "cpu"
    try:
        gpus = gpus_of(server.gpus, settings.worker_index, each)
    except ValueError as error:
        raise SettingsError(f"tiers: {tier.name}: sglang.gpus: {error}") from None
    collector = environment_value("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
    return ServerShape(
        python=server.python or sys.executable,
        model=str(model_folder(settings, tier.model)),
        name=tier.served_name,
        tp=server.tp,
        pp=server.pp,
        dp=server.dp,
        ep=server.ep,
        attn_dp=server.attn_dp,
        gpus=gpus,
        device=tier.device if gpus else worker_device(tier.device, settings.worker_index, each),
        dtype=tier.dtype,
        threads=tier.threads,
        mem_fraction=server.mem_fraction,
        kv_tokens=tier.kv_tokens or (DEFAULT_KV_TOKENS if on_cpu else None),
        kv_block_tokens=tier.kv_block_tokens,
        max_running=tier.max_running,
        max_queued=tier.max_queued,
        max_step_tokens=tier.max_step_tokens or (DEFAULT_STEP_TOKENS if on_cpu else None),
        max_context_tokens=tier.max_context_tokens,
        deterministic=server.deterministic,
        kv_store=str(settings.resolve(server.kv_store)) if server.kv_store and tier.workers > 1 else "",
        kv_store_bytes=int(server.kv_store_gib * GIB / max(1, tier.workers)),
        trace_to=collector.partition("://")[2] or collector,
        adapter=str(adapter) if adapter is not None else "",
        structured_output=server.structured_output,
        mixed_chunk=tier.batch_policy == "slo",
        flags=server.flags,
        env=server.env,
    )
