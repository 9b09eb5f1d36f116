"""Writes a shipped model as a GGUF file, in float32."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

ALIGNMENT = 32
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CONTROL = 3


def write_gguf(folder: Path, file: Path, **more: Any) -> Path:
    """The model in `folder`, a Llama in Hugging Face format, as `file`.

    more: metadata to add or replace; `.` is written `__`.
    """
    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [5] * len(tokens)  # unused
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": tokens.index(settings["bos_token"]),
        "tokenizer.ggml.eos_token_id": tokens.index(settings["eos_token"]),
        "tokenizer.ggml.padding_token_id": tokens.index(settings["pad_token"]),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    } | {key.replace("__", "."): value for key, value in more.items()}
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights = tensor.float().numpy()
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = weights
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = weights
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            if part.endswith(("q_proj", "k_proj")):
                weights = _interleaved(weights, heads if part.endswith("q_proj") else kv_heads)
            tensors[f"blk.{layer}.{_NAMES[part]}.weight"] = weights
    file.write_bytes(_file(metadata, tensors))
    return file


def _interleaved(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows in the order of llama.cpp's rotation, which turns neighbours."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _file(metadata: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]]) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        header += _string(key) + struct.pack("<I", kind) + data
    body = b""
    for name, weights in tensors.items():
        shape = weights.shape[::-1]
        header += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(body))
        body += _padded(weights.tobytes())
    return _padded(header) + body


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case list():
            if value and isinstance(value[0], int):
                return 9, struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)
            return 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(_string, value))
    raise TypeError(value)
