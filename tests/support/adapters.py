"""Makes LoRA adapters in PEFT's format, and models that have them merged."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA, SCALE = 4, 8, 0.2
PROJECTIONS = ("q_proj", "v_proj")


def write_adapter(model: Path, folder: Path, seed: int = 1) -> Path:
    """A random adapter of rank RANK of a model's attention, in a new folder, which is returned."""
    config, generator = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in PROJECTIONS:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = SCALE * torch.randn(RANK, hidden, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = SCALE * torch.randn(outputs[name], RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(PROJECTIONS),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(about | settings))
    return folder


def merged_model(model: Path, adapter: Path, folder: Path) -> Path:
    """A copy of a model in a new folder, with an adapter of `write_adapter` added to its weights: W + alpha / r * B A."""
    shutil.copytree(model, folder)
    weights, deltas = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in deltas.items():
        if name.endswith(".lora_A.weight"):
            up = deltas[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[target] = weights[target].float() + ALPHA / RANK * up @ down
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
