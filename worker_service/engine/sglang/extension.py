"""SGLang servers as an entry point: `sglang`."""

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.server_nodes import node_counts
from penstock.services.extensions.engines import CONTAINER_FOLDER, ENGINE_FIELDS, ServerContainer
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.common import DEFAULT_KV_TOKENS, DEFAULT_STEP_TOKENS, MAX_PORT
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.model_folder import folder_problem, is_hub_id, model_folder
from penstock.services.processes import free_port
from penstock.services.settings import ServiceSettings, environment_value
from penstock.types.problems import FieldProblem
from penstock.worker_service.engine.extension import EngineExtension, EngineSite
from penstock.worker_service.engine.sglang.adapter_folder import adapter_problem
from penstock.worker_service.engine.sglang.launch import ServerShape, command, environment

if TYPE_CHECKING:
    from penstock.worker_service.engine.interface import Engine

GIB = 1 << 30
SERVER_MARGIN_S = 60.0  # more than a server's own start time-out, so that its worker can report the error
LOOK_S = 30.0  # for an interpreter to say whether it has sglang

UNSUPPORTED_FLAGS = {
    "--nnodes": "a worker starts servers on its own machine, or where `up --on ray` has GPUs for it: else set endpoint",
    "--node-rank": "see --nnodes",
    "--dist-init-addr": "see --nnodes",
    "--enable-lora": "set the tier's adapter, the adapter that the tier serves its model with",
    "--lora-paths": "see --enable-lora",
    "--disaggregation-mode": "workers need servers that compute prompts and replies",
    "--is-embedding": "workers need servers that generate",
    "--api-key": "workers do not send a key",
}
"""Flags of SGLang servers that no worker can work with, and why."""
EXPERT_BACKEND = ("--moe-a2a-backend", "deepep")
"""Of a planned shape: without one, SGLang with --ep-size still gathers all tokens on all GPUs."""
OF_ANY_SERVER = frozenset({"endpoint", "gone_s", "start_timeout_s"})
"""The options of a running server, too: the others are of servers that workers start."""


class Sglang(EngineExtension):
    """The SGLang server behind each worker of a tier: started by the worker, or already running."""

    tier_fields = ENGINE_FIELDS - {"best_effort_reserve", "measuring_s", "speculation"}
    batch_policies = ("decode_first", "slo")

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
    env: dict[str, str] = Field(default={})
    """Additional environment variables of the server."""

    def models(self, tier: MeshTier) -> Iterator[tuple[str, str]]:
        yield "model", tier.model
        if tier.adapter:
            yield "adapter", tier.adapter

    def folder_problem(self, field: str, folder: Path) -> str:
        return adapter_problem(folder) if field == "adapter" else folder_problem(folder)

    def problems(self, tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
        for name in sorted(self.model_fields_set - OF_ANY_SERVER) if self.endpoint else ():
            yield FieldProblem(f"sglang.{name}", "is for servers that workers start, not for that of sglang.endpoint")
        for j, flag in enumerate(self.flags):
            name = flag.partition("=")[0]
            if (reason := UNSUPPORTED_FLAGS.get(name)) is not None:
                yield FieldProblem(f"sglang.flags[{j}]", f"{name} is not supported: {reason}")
        if tier.adapter and self.kv_store:
            yield FieldProblem("sglang.kv_store", "servers with an adapter do not share KV: leave it out")
        for name, size in (("ep", self.ep), ("attn_dp", self.attn_dp)):
            if self.tp % size:
                yield FieldProblem(f"sglang.{name}", f"must divide tp, {self.tp}, not {size}")
        if self.attn_dp > 1 and self.dp > 1:
            yield FieldProblem("sglang.attn_dp", "must not be combined with dp: SGLang refuses both")
        if tier.batch_policy == "slo":
            for name, problem in slo_shape_problems(self.dp, self.attn_dp):
                yield FieldProblem("batch_policy", f"slo needs sglang.{name} 1, {problem}")
        if self.gpus and len(self.gpus) < self._gpus_each * tier.workers:
            problem = f"{len(self.gpus)} for {tier.workers} workers of {self._gpus_each}"
            yield FieldProblem("sglang.gpus", problem)

    def host_problems(self, tier: MeshTier, settings: ServiceSettings) -> Iterator[FieldProblem]:
        if self.endpoint or settings.sglang_endpoint:
            return
        if self.python and shutil.which(self.python) is None:
            yield FieldProblem("sglang.python", f"no program {self.python}")
        elif not _has_sglang(self.python):
            where = self.python or sys.executable
            yield FieldProblem("sglang.python", f"{where} has no package sglang: name an interpreter that has it")

    def start_limit_s(self, tier: MeshTier, mesh: MeshFile) -> float:
        # servers that share a store start one after the other
        sharing = [each.workers for each in mesh.tiers if each.engine == tier.engine and each.options.get("kv_store")]
        return self.start_timeout_s * max(1, sum(sharing) if self.kv_store else 1) + SERVER_MARGIN_S

    def ports(self, tier: MeshTier) -> Iterator[tuple[str, int]]:
        if self.port and not self.endpoint:
            yield "sglang.port", self.port

    @property
    def _gpus_each(self) -> int:
        return self.tp * self.pp * self.dp

    def build(self, site: EngineSite) -> "Engine":
        from penstock.worker_service.engine.sglang.engine import SglangEngine
        from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions

        tier, settings = site.tier, site.settings
        endpoint = settings.sglang_endpoint or self.endpoint
        adapter = model_folder(settings, tier.adapter) if tier.adapter else None
        if adapter is not None and (problem := adapter_problem(adapter)):  # of a folder from the hub
            raise SettingsError(f"tiers: {tier.name}: adapter: {problem}")
        options = SglangEngineOptions(
            folder=model_folder(settings, tier.model),
            name=tier.served_name,
            endpoint=endpoint,
            launch=None if endpoint else self._own_server(site),
            adapter=adapter,
            port=self.port + settings.worker_index if self.port else 0,
            max_requests=tier.max_running * self.dp + tier.max_queued,
            max_context_tokens=tier.max_context_tokens,
            start_timeout_s=self.start_timeout_s,
            gone_s=self.gone_s,
            hold=site.hold,
            tool_format=tier.tool_format,
            model=tier.model,
            keeps_slos=tier.batch_policy == "slo",
            # a server over several nodes is not started once more with other flags
            tightest_tpot_s=None if settings.server_node is not None else site.mesh.slo.tightest_tpot_s,
        )
        return SglangEngine(options)

    def server_part(self, site: EngineSite) -> ServerContainer:
        shape = self._own_server(site)
        return ServerContainer(command(shape, free_port()), environment(shape))

    def gpu_count(self, tier: MeshTier) -> int:
        return 0 if self.endpoint or not super().gpu_count(tier) else self._gpus_each

    def node_counts(self, tier: MeshTier) -> tuple[int, ...]:
        # SGLang has no copies of a model behind one server over several nodes
        return (1,) if self.endpoint or self.dp > 1 else node_counts(ReplicaShape(self.tp, self.pp))

    def shape(self, tier: MeshTier) -> ReplicaShape | None:
        return None if self.endpoint else ReplicaShape(self.tp, self.pp, tier.gpu_type, self.ep, self.attn_dp)

    def in_shape(self, tier: MeshTier, shape: ReplicaShape) -> MeshTier:
        if self.endpoint:
            raise SettingsError(f"the server of sglang.endpoint has the shape that it was started with, not {shape}")
        options: dict[str, object] = {"tp": shape.tp, "pp": shape.pp, "ep": shape.ep, "attn_dp": shape.attn_dp}
        if shape.ep > 1 and EXPERT_BACKEND[0] not in self.flags:
            options["flags"] = (*self.flags, *EXPERT_BACKEND)
        return tier.model_copy(update={"gpu_type": shape.gpu}).with_options(**options)

    def server(self, tier: MeshTier, settings: ServiceSettings, host: str, port: int) -> ServerContainer | None:
        if self.endpoint:
            return None

        def in_container(model: str) -> str:
            return model if not model or is_hub_id(settings, model) else str(CONTAINER_FOLDER / model)

        device = tier.device.partition(":")[0]  # a container sees the GPUs that it was given
        shape = self._server_shape(tier, "python3", in_container(tier.model), in_container(tier.adapter))
        shape = dataclasses.replace(shape, device=device, kv_store=in_container(shape.kv_store))
        return ServerContainer(command(shape, port, host), environment(shape))

    def _own_server(self, site: EngineSite) -> ServerShape:
        """The shape of the server that this worker starts."""
        tier, settings, each, index = site.tier, site.settings, self._gpus_each, site.settings.worker_index
        gpus = self.gpus[index * each : (index + 1) * each]
        if self.gpus and len(gpus) < each:
            problem = f"no {each} GPUs for worker {index} among {len(self.gpus)}"
            raise SettingsError(f"tiers: {tier.name}: sglang.gpus: {problem}")
        collector = environment_value("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
        model, adapter = (str(model_folder(settings, name)) if name else "" for name in (tier.model, tier.adapter))
        shape = self._server_shape(tier, self.python or sys.executable, model, adapter)
        return dataclasses.replace(
            shape,
            gpus=gpus,
            device=tier.device if gpus else site.device(each),
            kv_store=str(settings.resolve(shape.kv_store)) if shape.kv_store else "",
            trace_to=collector.partition("://")[2] or collector,
            node=settings.server_node,
        )

    def _server_shape(self, tier: MeshTier, python: str, model: str, adapter: str) -> ServerShape:
        """The shape of a server of this tier, on any machine."""
        on_cpu = tier.device == "cpu"
        own = "tp", "pp", "dp", "ep", "attn_dp", "mem_fraction", "deterministic", "structured_output", "flags", "env"
        of_tier = "device", "dtype", "threads", "kv_block_tokens", "max_running", "max_queued", "max_context_tokens"
        options: dict[str, Any] = {name: getattr(self, name) for name in own}
        options |= {name: getattr(tier, name) for name in of_tier}
        return ServerShape(
            python=python,
            model=model,
            name=tier.served_name,
            kv_tokens=tier.kv_tokens or (DEFAULT_KV_TOKENS if on_cpu else None),
            max_step_tokens=tier.max_step_tokens or (DEFAULT_STEP_TOKENS if on_cpu else None),
            kv_store=self.kv_store if tier.workers > 1 else "",
            kv_store_bytes=int(self.kv_store_gib * GIB / max(1, tier.workers)),
            adapter=adapter,
            mixed_chunk=tier.batch_policy == "slo",
            **options,
        )


def slo_shape_problems(dp: int, attn_dp: int) -> Iterator[tuple[str, str]]:
    """(size, problem) of an SGLang server whose steps a worker cannot predict for SLOs.

    A worker predicts one batch and one pool of KV. A server with several distributes requests over them itself.
    """
    for name, size, part in (("dp", dp, "copy of the model"), ("attn_dp", attn_dp, "group of attention")):
        if size > 1:
            own = f"each {part} has a batch and KV of its own, and the server chooses one for a request"
            yield name, f"not {size}: {own}, so a worker cannot predict what can be kept"


def _has_sglang(python: str) -> bool:
    """Whether an interpreter has sglang. python: the interpreter; empty: this one."""
    if not python:
        return importlib.util.find_spec("sglang") is not None
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        return subprocess.run([python, "-c", code], timeout=LOOK_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
