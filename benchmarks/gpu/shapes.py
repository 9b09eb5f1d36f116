"""Models of real shapes with random weights, for step times need no others, and those in folders. Nothing is downloaded."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOKENIZER = Path("models/family/small")  # its files replace the tokenizer: prompts are random token ids
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
END_TOKEN = 257  # of this tokenizer; replies have a fixed length and never end at it


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama shape, and what is measured with it.

    prompt, output: tokens of the replayed requests, from and to. short, long: lengths of mixed batches.
    max_running, max_step_tokens: limits of the engine. kv_tokens: None for as many as fit into the GPU.
    folder: of its model in Hugging Face format; None: random weights.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool
    context: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    short: int
    long: int
    max_running: int
    max_step_tokens: int
    kv_tokens: int | None = None
    folder: Path | None = None

    def config(self, dtype: str) -> dict[str, Any]:
        """The model's config, as in `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "bos_token_id": END_TOKEN - 1,
            "eos_token_id": END_TOKEN,
        }


TINY = Shape(
    name="tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=192,
    vocabulary=264,
    tied=True,
    context=2048,
    prompt=(8, 48),
    output=(8, 32),
    short=16,
    long=320,
    max_running=16,
    max_step_tokens=128,
    kv_tokens=8192,
)
LLAMA_1B = Shape(
    name="1b",  # Llama 3.2 1B
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    vocabulary=128_256,
    tied=True,
    context=32_768,
    prompt=(30, 1000),
    output=(32, 256),
    short=200,
    long=10_000,
    max_running=256,
    max_step_tokens=2048,
)
LLAMA_8B = replace(LLAMA_1B, name="8b", layers=32, hidden=4096, head_dim=128, mlp=14_336, tied=False)  # Llama 3.1 8B
SHAPES = {shape.name: shape for shape in (TINY, LLAMA_1B, LLAMA_8B)}


def shape_of(folder: Path) -> Shape:
    """What is measured with a model in Hugging Face format."""
    config = json.loads((folder / "config.json").read_text())
    heads, context = int(config["num_attention_heads"]), int(config["max_position_embeddings"])
    return replace(
        LLAMA_1B,
        name=folder.name,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        mlp=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config["tie_word_embeddings"]),
        context=context,
        long=min(LLAMA_1B.long, context // 2),
        folder=folder,
    )


def write_config(folder: Path, shape: Shape, dtype: str) -> Path:
    """Write the config and a tokenizer of a model: enough for an engine that makes up the weights itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(dtype), indent=1) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    return folder


def write_model(folder: Path, shape: Shape, dtype: str, device: str, seed: int) -> Path:
    """Write a model with random weights, made on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder, shape, dtype)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(str(folder))
    return folder
