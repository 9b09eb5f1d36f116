"""GPUs and models: of the catalogue by name, or by what a question says of them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from penstock.planner_service.files.catalogue import catalogue
from penstock.services.domain.errors import check, invalid
from penstock.services.domain.hardware import Arithmetic, EngineSpec, GpuSpec, ModelSpec
from penstock.services.domain.latency import EngineCpu
from penstock.types.planning import Gpu, Model
from penstock.types.problems import FieldProblem

NEEDED = {  # where a GPU or a model is not of the catalogue
    Gpu: ("memory_gb", "memory_gb_per_s", "tflops", "link_gb_per_s"),
    Model: ("layers", "hidden", "heads", "kv_heads", "head_dim", "parameters"),
}


def gpu_spec(gpu: Gpu, at: str) -> GpuSpec:
    """Raises:
    InvalidRequest: The catalogue has no such GPU, or the data sheet is unsound; names the field, from `at` on.
    """
    if gpu == Gpu(gpu.name):
        return _gpu_spec(Gpu(gpu.name, **_entry("gpus", gpu.name, at)))
    check(_missing(gpu, at))
    return _gpu_spec(gpu)


def model_spec(model: Model, at: str, name: str = "") -> ModelSpec:
    """name: of a model that has none.

    Raises:
        InvalidRequest: The catalogue has no such model, or the shape is unsound; names the field, from `at` on.
    """
    if model == Model(model.name):
        return _model_spec(Model(model.name, **_entry("models", model.name, at)))
    check(_missing(model, at))
    check(_shape_problems(model, at))
    return _model_spec(dataclasses.replace(model, name=model.name or name))


def gpu_of_catalogue(name: str) -> GpuSpec:
    """InvalidRequest lists what there is."""
    return gpu_spec(Gpu(name), "gpu")


def model_of_catalogue(name: str) -> ModelSpec:
    """InvalidRequest lists what there is."""
    return model_spec(Model(name), "model")


def engine_spec(name: str, at: str) -> EngineSpec:
    """InvalidRequest at a field where the catalogue has no such engine."""
    entry = dict(_entry("engines", name, at))
    fast, slow, overlapped = (entry.pop(key) for key in ("fast", "slow", "overlapped"))
    seconds = {f"{key.removesuffix('_ms')}_s": ms / 1e3 for key, ms in entry.items()}
    return EngineSpec(name, EngineCpu(**seconds, overlapped=overlapped), fast, slow)


def engine_of_catalogue(name: str) -> EngineSpec:
    """InvalidRequest lists what there is."""
    return engine_spec(name, "engine")


def _entry(kind: str, name: str, at: str) -> dict[str, Any]:
    known = catalogue(kind)
    if not name:
        raise invalid(at, "missing: give a name of the catalogue, or what it is")
    if name not in known:
        raise invalid(at, f"no '{name}' in the catalogue: {', '.join(sorted(known))}")
    entry: dict[str, Any] = known[name]
    return entry


def _missing(value: Gpu | Model, at: str) -> Iterator[FieldProblem]:
    for name in NEEDED[type(value)]:
        if not getattr(value, name) > 0:
            yield FieldProblem(f"{at}.{name}", "missing: must be over 0 where it is not of the catalogue")


def _shape_problems(model: Model, at: str) -> Iterator[FieldProblem]:
    names = [each.value for each in Arithmetic]
    if model.arithmetic not in names:
        yield FieldProblem(f"{at}.arithmetic", f"must be {' or '.join(names)}, not {model.arithmetic[:80]}")
        return
    if model.arithmetic != Arithmetic.BITS_16.value and model.bytes_per_parameter is None:
        yield FieldProblem(
            f"{at}.bytes_per_parameter", f"is needed with arithmetic {model.arithmetic}: what weights take"
        )
    of_experts = ("experts", "experts_per_token", "expert_parameters")
    given = [name for name in of_experts if getattr(model, name) is not None]
    if 0 < len(given) < len(of_experts):
        missing = next(name for name in of_experts if name not in given)
        yield FieldProblem(f"{at}.{missing}", f"is needed with {' and '.join(given)}")
        return
    if model.experts and model.experts_per_token and model.experts_per_token > model.experts:
        yield FieldProblem(
            f"{at}.experts_per_token", f"must be at most experts, {model.experts}, not {model.experts_per_token}"
        )
        return
    parts = [name for name in ("expert_parameters", "attention") if getattr(model, name) is not None]
    if sum(getattr(model, name) for name in parts) > model.parameters:
        yield FieldProblem(
            f"{at}.{parts[0]}", f"{' and '.join(parts)} must be at most parameters, {model.parameters:g} billion"
        )
    spec = _model_spec(model)
    if spec.active_parameters < spec.active_expert_parameters:
        least = spec.active_expert_parameters / 1e9
        yield FieldProblem(
            f"{at}.active", f"must be at least the experts of a token, {least:.3g} billion, not {model.active:g}"
        )


def _gpu_spec(gpu: Gpu) -> GpuSpec:
    narrow = (
        (Arithmetic.FP8, gpu.fp8_tflops),
        (Arithmetic.INT8, gpu.int8_tops),
        (Arithmetic.FP4, gpu.fp4_tflops),
        (Arithmetic.INT4, gpu.int4_tops),
    )
    return GpuSpec(
        gpu.name or "gpu",
        gpu.memory_gb * 1e9,
        gpu.memory_gb_per_s * 1e9,
        gpu.tflops * 1e12,
        gpu.link_gb_per_s * 1e9,
        gpu.compute_efficiency,
        gpu.memory_efficiency,
        tuple((arithmetic, peak * 1e12) for arithmetic, peak in narrow if peak is not None),
        gpu.host_speed,
    )


def _model_spec(model: Model) -> ModelSpec:
    experts, of_token, in_experts = model.experts or 0, model.experts_per_token or 0, model.expert_parameters or 0.0
    unused = in_experts * (1 - of_token / experts) if experts else 0.0  # by one token
    return ModelSpec(
        model.name,
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.parameters * 1e9,
        (model.active or model.parameters - unused) * 1e9,
        model.bytes_per_parameter or 2.0,
        (model.kv_per_layer_bytes or 2.0 * 2 * model.kv_heads * model.head_dim) * model.layers,
        Arithmetic(model.arithmetic),
        experts,
        of_token,
        in_experts * 1e9,
        None if model.attention is None else model.attention * 1e9,
    )
