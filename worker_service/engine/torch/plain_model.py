"""Reads Llama, Qwen 2 and Qwen 3 models with default rotary positions from their files, without transformers' models.

Importing those takes longer than loading a small model: 4 of 7 seconds of CPU time until a worker is ready. What is read
here has the names of transformers' modules, as far as the fused forward pass and the compiled loop use them; tests compare
it with them. All other models are loaded by transformers.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional

from penstock.worker_service.engine.torch.supported import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Whole numbers in config.json; without one of them transformers decides."""
DEFAULT_ROPE_THETA = 10_000.0


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Norm(nn.Module):
    """An RMS norm's weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = _empty(width), eps


class Product(nn.Module):
    """A `Linear` that is not initialised at random, which would import torch's compiler."""

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.out_features, self.weight = outputs, _empty(outputs, inputs)
        self.register_parameter("bias", _empty(outputs) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = _empty(rows, width)


class Rotary(nn.Module):
    """The default rotary frequencies."""

    attention_scaling = 1.0

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)


class PlainModel(nn.Module):
    """The weights of a model. model: its body."""

    model: Any

    def __init__(self, config: SimpleNamespace, biases: frozenset[str]) -> None:
        """biases: names of the products with a bias, such as `q_proj`."""
        super().__init__()
        self.config = config
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps

        def product(name: str, inputs: int, outputs: int) -> Product:
            return Product(inputs, outputs, bias=name in biases)

        def layer() -> nn.Module:
            attention, mlp, whole = nn.Module(), nn.Module(), nn.Module()
            queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
            attention.q_proj = product("q_proj", hidden, queries)
            attention.k_proj = product("k_proj", hidden, keys)
            attention.v_proj = product("v_proj", hidden, keys)
            attention.o_proj = product("o_proj", queries, hidden)
            if config.model_type == "qwen3":
                attention.q_norm, attention.k_norm = Norm(head_dim, eps), Norm(head_dim, eps)
            attention.scaling = head_dim**-0.5
            mlp.gate_proj = product("gate_proj", hidden, config.intermediate_size)
            mlp.up_proj = product("up_proj", hidden, config.intermediate_size)
            mlp.down_proj = product("down_proj", config.intermediate_size, hidden)
            whole.self_attn, whole.mlp = attention, mlp
            whole.input_layernorm, whole.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
            return whole

        self.model = nn.Module()
        self.model.embed_tokens = Embedding(config.vocab_size, hidden)
        self.model.layers = nn.ModuleList(layer() for _ in range(config.num_hidden_layers))
        self.model.norm = Norm(hidden, eps)
        self.lm_head = Product(hidden, config.vocab_size)
        self.model.rotary_emb = None

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def read_config(folder: Path) -> SimpleNamespace | None:
    """The parts of config.json that are needed here; None for a model that transformers has to load."""
    content: Any = json.loads((folder / "config.json").read_text())
    if not isinstance(content, dict) or content.get("model_type") not in ARCHITECTURES:
        return None
    kind, rope = content["model_type"], content.get("rope_parameters") or content.get("rope_scaling") or {}
    if (
        content.get("architectures") != [ARCHITECTURES[kind]]
        or content.get("hidden_act") != "silu"
        or content.get("quantization_config")
        or content.get("use_sliding_window")
        or (rope.get("rope_type") or rope.get("type") or "default") != "default"
        or rope.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0)) != 1.0
        or not all(type(content.get(name)) is int and content[name] > 0 for name in NEEDED)
        or not ((folder / WEIGHTS).exists() or (folder / INDEX).exists())
    ):
        return None
    if kind == "qwen3" and "head_dim" not in content:
        return None
    return SimpleNamespace(
        **{name: content[name] for name in NEEDED},
        model_type=kind,
        head_dim=content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"],
        rms_norm_eps=float(content.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or content.get("rope_theta") or DEFAULT_ROPE_THETA),
        dtype=content.get("dtype") or content.get("torch_dtype"),
        tie_word_embeddings=bool(content.get("tie_word_embeddings", False)),
    )


def read_model(
    folder: Path, config: SimpleNamespace, dtype: str, progress: Callable[[float], None] = lambda _: None
) -> PlainModel:
    """The model, on the CPU.

    dtype: `auto` is that of config.json, or else of the file. progress: told the share that is read.

    Raises:
        ValueError: Weights are missing, or their shapes are not those of config.json.
    """
    with ExitStack() as stack:
        names = _files(folder)
        opened = {
            name: stack.enter_context(safe_open(str(folder / name), framework="pt")) for name in set(names.values())
        }
        biases = frozenset(name.split(".")[-2] for name in names if name.endswith(".bias"))
        chosen = DTYPES.get(config.dtype if dtype == "auto" else dtype)
        tied = config.tie_word_embeddings or "lm_head.weight" not in names
        with torch.device("meta"):
            model = PlainModel(config, biases)
        parameters = list(model.named_parameters())
        for number, (name, parameter) in enumerate(parameters, 1):
            source = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
            if source not in names:
                raise ValueError(f"{folder}: no weights '{source}'")
            value = opened[names[source]].get_tensor(source)
            if value.shape != parameter.shape:
                raise ValueError(f"{folder}: '{source}' is {tuple(value.shape)}, not {tuple(parameter.shape)}")
            chosen = chosen or value.dtype
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(value.to(chosen), requires_grad=False))
            progress(number / len(parameters))
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = Rotary(config.head_dim, config.rope_theta)
    return model.eval()


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (folder / INDEX).exists():
        listed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return listed
    with safe_open(str(folder / WEIGHTS), framework="pt") as weights:
        return dict.fromkeys(weights.keys(), WEIGHTS)


CausalModel: TypeAlias = "PlainModel | PreTrainedModel"
