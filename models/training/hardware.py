"""The device of a training run, and its precision there."""

import torch


def device_named(name: str) -> torch.device:
    """`auto` is the GPU if torch sees one, else the CPU.

    Raises:
        ValueError: `cuda` is asked for and torch sees no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no GPU")
    return torch.device(name)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16.

    A CPU without them emulates: a step of the medium tier took seven times as long as in float32 (AMD EPYC with AVX2).
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def autocast(device: torch.device) -> torch.autocast:
    """Products in bfloat16 where the device multiplies it, else in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device))
