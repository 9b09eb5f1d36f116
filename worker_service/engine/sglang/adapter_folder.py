"""Folders with a LoRA adapter in PEFT's format. Reads them, nothing else."""

import json
from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_problem(folder: Path) -> str:
    """Why this folder holds no LoRA adapter; empty if it holds one."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            return f"{folder} has no {name}: a LoRA adapter in PEFT's format is needed"
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        return f"{folder / CONFIG}: {error}"
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return f"{folder / CONFIG}: peft_type must be LORA"
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        return f"{folder / CONFIG}: r must be a positive integer"
    return ""
