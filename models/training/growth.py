"""Grow a larger Llama from a trained smaller one, so that its training continues from there.

Width is added by padding, and depth by layers without output, so the grown model computes the same as its seed
up to small noise, which breaks the symmetry of the new columns. After bert2BERT (Chen et al., 2022) and LEMON (Wang et
al., 2024); padding rather than copying keeps RMSNorm exact with one factor: the mean of squares runs over more entries.
"""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NOISE = 0.02  # standard deviation of the output weights of new columns; input weights are initialised as usual


def grow(seed: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A model of shape `config` that computes nearly what `seed` computes.

    Head size, the number of key/value heads and the vocabulary must be those of the seed; everything else may only grow.

    Raises:
        ValueError: The shape is smaller than the seed.
    """
    old = seed.config
    if (config.head_dim, config.num_key_value_heads, config.vocab_size) != (
        old.head_dim,
        old.num_key_value_heads,
        old.vocab_size,
    ):
        raise ValueError("head_dim, num_key_value_heads and vocab_size must be the seed's")
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, field) < getattr(old, field):
            raise ValueError(f"{field} must not shrink")
    model = LlamaForCausalLM(config)
    norm = math.sqrt(old.hidden_size / config.hidden_size)
    heads = _heads(old, config)
    mlp = torch.arange(old.intermediate_size)
    width = torch.arange(old.hidden_size)
    places = _layer_places(old.num_hidden_layers, config.num_hidden_layers)
    with torch.no_grad():
        _pad(model.model.embed_tokens.weight, seed.model.embed_tokens.weight, None, width, NOISE / 4)
        _norm(model.model.norm.weight, seed.model.norm.weight, norm)
        for index, layer in enumerate(model.model.layers):
            attention, ffn = layer.self_attn, layer.mlp
            if index not in places:  # a new layer has input weights as usual, and zero output weights
                attention.o_proj.weight.zero_()
                ffn.down_proj.weight.zero_()
                continue
            from_layer = seed.model.layers[places[index]]
            old_attention, old_ffn = from_layer.self_attn, from_layer.mlp
            _norm(layer.input_layernorm.weight, from_layer.input_layernorm.weight, norm)
            _norm(layer.post_attention_layernorm.weight, from_layer.post_attention_layernorm.weight, norm)
            _pad(attention.q_proj.weight, old_attention.q_proj.weight, heads, width, NOISE)
            _pad(attention.k_proj.weight, old_attention.k_proj.weight, None, width, NOISE)
            _pad(attention.v_proj.weight, old_attention.v_proj.weight, None, width, NOISE)
            _write(attention.o_proj.weight, old_attention.o_proj.weight, width, heads)
            _pad(ffn.gate_proj.weight, old_ffn.gate_proj.weight, mlp, width, NOISE)
            _pad(ffn.up_proj.weight, old_ffn.up_proj.weight, mlp, width, NOISE)
            _write(ffn.down_proj.weight, old_ffn.down_proj.weight, width, mlp)
    return model


def _heads(old: LlamaConfig, new: LlamaConfig) -> torch.Tensor:
    """Rows of the new q_proj for the query heads of the seed: each keeps its key/value head."""
    before = old.num_attention_heads // old.num_key_value_heads
    after = new.num_attention_heads // new.num_key_value_heads
    rows = [
        torch.arange(new.head_dim) + (group * after + head) * new.head_dim
        for group in range(old.num_key_value_heads)
        for head in range(before)
    ]
    return torch.cat(rows)


def _layer_places(old: int, new: int) -> dict[int, int]:
    """New layer index to seed layer: the seed's layers in order, new ones spread between them."""
    return {math.floor((layer + 1) * new / old) - 1: layer for layer in range(old)}


def _norm(new: torch.Tensor, old: torch.Tensor, factor: float) -> None:
    new.fill_(factor)
    new[: old.shape[0]] = old * factor


def _pad(new: torch.Tensor, old: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor, noise: float) -> None:
    """Put `old` (rows x columns) into `new`; new columns get noise, new rows keep their initial values."""
    rows = torch.arange(old.shape[0]) if rows is None else rows
    block = torch.randn(len(rows), new.shape[1]) * noise
    block[:, columns] = old
    new[rows] = block


def _write(new: torch.Tensor, old: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Put `old` into `new`; old rows have zero weights for new columns, new rows start as noise."""
    block = torch.randn_like(new) * NOISE / 4
    block[: len(rows)] = 0.0
    block[rows[:, None], columns[None, :]] = old
    new.copy_(block)
