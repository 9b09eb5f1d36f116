"""What the torch engine can serve, by the model's config.json. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from penstock.services.model_folder import folder_problem

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The models of the torch engine, all of which have a fused pass: the type in config.json, and the class in transformers."""


FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # the others' frequencies depend on the length of the sequence


def unsupported(folder: Path) -> str:
    """Why the engine cannot serve the model in this folder; empty if it can."""
    if problem := folder_problem(folder):
        return problem
    try:
        config: Any = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        return f"{folder / 'config.json'}: {error}"
    if not isinstance(config, dict):
        return f"{folder / 'config.json'}: no JSON object"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return f"{folder}: the weights are quantized ({method}). SGLang serves it: engine: sglang"
    if config.get("model_type") not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"{folder}: model type '{config.get('model_type')}' is not one of {known}. SGLang may serve it: engine: sglang"
    if problem := _rotary_problem(config):
        return f"{folder}: {problem}. SGLang may serve it: engine: sglang"
    if config.get("hidden_act", "silu") != "silu":
        return f"{folder}: hidden_act '{config['hidden_act']}' is not supported. SGLang may serve it: engine: sglang"
    if _slides(config):
        return f"{folder}: sliding-window attention is not supported"
    return ""


def _rotary_problem(config: dict[str, Any]) -> str:
    """Why the fused pass cannot compute the model's rotary positions; empty if it can."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in FIXED_ROPE:
        return f"rotary positions of type '{kind}' are not supported"
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0
    return "rotary positions of a part of each head are not supported" if partial else ""


def _slides(config: dict[str, Any]) -> bool:
    """Whether a layer has sliding-window attention: as listed, or as transformers derives it for Qwen."""
    if "layer_types" in config:
        return "sliding_attention" in (config["layer_types"] or ())
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return False
    return int(config.get("max_window_layers", 28)) < int(config.get("num_hidden_layers", 32))


HALF_INSTRUCTIONS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""What the CPU says of itself (flags of /proc/cpuinfo) that computes in half precision; without any, float32 is faster."""


def dtype_on(device: str, stated: str, folder: Path, flags: frozenset[str] | None = None) -> str:
    """The type of a model's weights on a device. stated: `auto` or a type. flags: of the CPU; None: of this one."""
    if stated != "auto" or not device.startswith("cpu"):
        return stated
    config: Any = json.loads((folder / "config.json").read_text())
    needed = HALF_INSTRUCTIONS.get(str(config.get("dtype") or config.get("torch_dtype")))
    if needed is None:
        return stated
    return stated if needed & (cpu_flags() if flags is None else flags) else "float32"


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset(
        flag for name, _, value in named if name.strip() in ("flags", "Features") for flag in value.split()
    )
