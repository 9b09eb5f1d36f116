"""`penstock profile`: measure the step times of an engine on this machine, for the planner."""

import asyncio
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options, targets
from penstock.cli.output import (
    console,
    errors,
    failing_on,
    needs_extra,
    planner_error_handling,
    print_json,
    print_line,
    print_written,
    progress,
)

if TYPE_CHECKING:
    from penstock.types.plans import QoeModel
    from penstock.worker_service.engine.core import EngineCore
    from penstock.worker_service.engine.interface import EngineInfo
    from penstock.worker_service.engine.profile import StepSample
    from penstock.worker_service.engine.sglang.client import ServerInfo

MAX_THREADS = 1024
MAX_BATCH = 65_536


@needs_extra("profile", "mesh")
def profile(
    model: Annotated[Path, typer.Argument(help="A model folder in Hugging Face format, or a GGUF file.")],
    out: Annotated[Path, options.new_file("The profile to write.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, options.number("CPU threads.", 1, MAX_THREADS)] = 1,
    kv_tokens: Annotated[int, options.tokens("Capacity of the KV cache, in tokens.", 64)] = 32_768,
    max_running: Annotated[int, options.number("Largest batch.", 1, MAX_BATCH)] = 32,
    max_step_tokens: Annotated[int, options.tokens("Largest number of tokens in a step.")] = 512,
    seed: Annotated[int, options.seed("Seed of the prompts.")] = 0,
    qoe: Annotated[
        bool, typer.Option(help="Measure batches for the QoE model as well, which length stages need.")
    ] = True,
    sglang: Annotated[str, typer.Option(help="Base URL of an idle SGLang server to measure instead.")] = "",
    json: targets.Json = False,
) -> None:
    """Measure the steps of the built-in engine or of a running SGLang server, and fit the planner's latency model to them.

    With the built-in engine, batches are measured too, and the QoE model is fitted to them, unless --no-qoe is given: they
    take most of the time. An SGLang server keeps its own limits: --kv-tokens, --max-running and --max-step-tokens do not
    apply, and no batches are measured.
    """
    from penstock.planner_service.files.profiles import IDENTIFIED, Profile, write_profile
    from penstock.planner_service.simulator import EngineLimits, Replica
    from penstock.services.domain.errors import PenstockError
    from penstock.services.domain.hardware import ReplicaShape
    from penstock.services.domain.latency_fit import fit_latency
    from penstock.worker_service.engine.interface import EngineUnusable
    from penstock.worker_service.engine.profile import measure

    machine = f"{platform.machine()}, {device}, {threads} threads" if device == "cpu" else device
    fitted, kv_bytes = None, 0.0
    with planner_error_handling(), progress(quiet=json) as bars:
        bar = bars.add_task("measuring", total=None)

        def show(completed: int, of: int) -> None:
            bars.update(bar, completed=completed, total=of)

        if sglang:
            with failing_on(PenstockError, status=2):
                samples, server = asyncio.run(_of_server(sglang, model, seed, show))
            shape = ReplicaShape(server.tp, server.pp, ep=server.ep, attn_dp=server.attn_dp)
            machine, step_tokens = f"SGLang at {sglang}", server.step_tokens * server.attn_dp
            limits, room = EngineLimits(server.max_running, step_tokens, server.page_tokens), server.kv_tokens
        else:
            size = {"kv_tokens": kv_tokens, "max_running": max_running, "max_queued": max_running}
            size |= {"max_step_tokens": max_step_tokens, "threads": threads}
            with failing_on(EngineUnusable, status=2):
                core, info = _built_in_core(model, device, size)
            samples = measure(core, seed=seed, on_progress=show)
            fitted = _fitted_qoe(core, seed, show) if qoe else None
            if qoe and fitted is None:
                errors.print("no QoE model: too few requests end in the time for measuring batches", highlight=False)
            kv_bytes = core.runner.kv_layout.block_bytes / core.runner.kv_layout.block_tokens
            limits = EngineLimits(max_running, max_step_tokens, info.kv_block_tokens)
            shape, room = ReplicaShape(1, 1), info.kv_blocks * info.kv_block_tokens
    qoe_model, held_out, batches, uncertainty = fitted or (None, 0.0, 0, None)
    with planner_error_handling():
        latency, mean_error = fit_latency(samples)
    replica = Replica(shape, latency, room, limits)
    engine, steps = "sglang" if sglang else info.engine, tuple(samples)
    measured = Profile(
        model.name, engine, machine, replica, steps, mean_error, None, qoe_model, held_out, kv_bytes, uncertainty
    )
    write_profile(out, measured)
    if json:
        figures = {"samples": len(samples), "mean_error": mean_error, "latency": latency, "out": str(out)}
        finite = uncertainty if uncertainty is not None and math.isfinite(uncertainty) else None
        about = {"qoe_requests": batches, "qoe_error": held_out, "qoe_context_uncertainty": finite}
        print_json({**figures, "qoe": qoe_model, **about})
        return
    console.print(f"{len(samples)} step loads, mean error of the fit {mean_error:.1%}", highlight=False)
    print_written(out)
    if qoe_model is not None:
        console.print(f"QoE: {batches} requests, mean error on the held-out half {held_out:.1%}", highlight=False)
        if uncertainty is not None and uncertainty > IDENTIFIED:
            print_line(
                f"D4, the cost of lengths so far, is not identified by these batches: {uncertainty:.0%} of the cost may be "
                f"its or not (at most {IDENTIFIED:.0%} is meant)"
            )
    for n in (1, 8, 32):
        if n <= limits.max_running:
            console.print(f"decode step of {n:>2}: {1000 * latency.base_s(n):.1f} ms before attention", highlight=False)
    rate = replica.capacity_per_s(200, 200)
    console.print(f"capacity at 200 + 200 tokens: {rate:.2f} requests/s", highlight=False)


def _built_in_core(model: Path, device: str, size: dict[str, Any]) -> "tuple[EngineCore, EngineInfo]":
    """The core of the built-in engine, on torch or llama.cpp. Raises EngineUnusable."""
    from penstock.services.clock import SystemClock
    from penstock.services.gguf import gguf_file
    from penstock.worker_service.engine.llamacpp.engine import LlamaCppEngineOptions, llamacpp_core
    from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core

    if (file := gguf_file(model)) is not None:
        return llamacpp_core(LlamaCppEngineOptions(file, file.stem, gpu=device != "cpu", **size), SystemClock())
    return torch_core(TorchEngineOptions(model, model.name, device=device, **size), SystemClock())


def _fitted_qoe(
    core: "EngineCore", seed: int, show: Callable[[int, int], None]
) -> "tuple[QoeModel, float, int, float] | None":
    """(model, mean error on held-out requests, number of requests, uncertainty of D4). Every other request is held out.

    None where the engine is too slow for LEAST_SAMPLES.
    """
    import numpy as np

    from penstock.planner_service.files.profiles import context_uncertainty, fit_qoe, qoe_errors
    from penstock.worker_service.engine.qoe_profile import LEAST_SAMPLES, MEASURE_S, measure_qoe, profile_cells

    samples = measure_qoe(core, profile_cells(core), seed=seed, on_progress=show, most_s=MEASURE_S)
    if len(samples) < LEAST_SAMPLES:
        return None
    held_out = float(np.abs(qoe_errors(fit_qoe(samples[::2]), samples[1::2])).mean())
    model = fit_qoe(samples)
    return model, held_out, len(samples), context_uncertainty(model, samples)


async def _of_server(
    endpoint: str, model: Path, seed: int, show: Callable[[int, int], None]
) -> "tuple[list[StepSample], ServerInfo]":
    from penstock.worker_service.engine.sglang.client import SglangClient
    from penstock.worker_service.engine.sglang.engine import config_vocab
    from penstock.worker_service.engine.sglang.profile import measure_server

    client = SglangClient(endpoint)
    try:
        server = await client.info()
        return await measure_server(client, server, config_vocab(model), seed=seed, on_progress=show), server
    finally:
        await client.close()
