"""The fused forward pass computes what transformers' modules compute, and takes no more memory."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from worker_service.engine.torch.attention import KernelThreads, KvPool, PagedBatch
from worker_service.engine.torch.forward import Forward, FusedForward, can_fuse
from worker_service.engine.torch.module_forward import ModuleForward
from worker_service.engine.torch.step_layout import Segment

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A random model in which every weight matters: norms that are not 1, biases that are not 0."""
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
        "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
        "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    }
    torch.manual_seed(3)
    model = models[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().to(dtype)


def hidden_states(forward: Forward, model: PreTrainedModel, threads: KernelThreads | None) -> list[torch.Tensor]:
    """Of two steps: prompts of several lengths, then a decode, a short and a long chunk; the second for some rows only."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pool = KvPool(config.num_hidden_layers, 64, 8, config.num_key_value_heads, head_dim, model.dtype, "cpu")
    tables = np.arange(30, dtype=np.int64).reshape(3, 10)
    results, done = list[torch.Tensor](), [0, 0, 0]
    with torch.inference_mode():
        for counts, rows in (([5, 20, 11], None), ([1, 4, 30], [0, 4, 34])):
            segments, first = [], 0
            for i, count in enumerate(counts):
                segments.append(Segment(first, count, done[i], i))
                done[i] += count
                first += count
            paged = PagedBatch(pool, segments, tables, threads)
            paged.place([torch.from_numpy(np.ascontiguousarray(index)) for index in paged.indices])
            tokens = torch.arange(first) * 7 % 60
            selected = None if rows is None else torch.tensor(rows)
            results.append(forward(tokens, torch.from_numpy(paged.positions), paged, selected))
    return results


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama3-rope", "llama-yarn", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "compiled", "tolerance"),
    [(torch.float32, True, 2e-5), (torch.float32, False, 2e-5), (torch.bfloat16, False, 0.12)],
)
def test_hidden_states_are_those_of_the_modules(
    name: str, dtype: torch.dtype, compiled: bool, tolerance: float
) -> None:
    threads = KernelThreads(1) if compiled else None
    model = model_of(name, dtype)
    assert can_fuse(model)
    expected = hidden_states(ModuleForward(model), model, threads)
    results = hidden_states(FusedForward(model, compiled=compiled), model, threads)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, atol=tolerance, rtol=tolerance)


def test_the_modules_share_the_memory_of_the_fused_weights() -> None:
    model = model_of("llama-biases", torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    forward = FusedForward(model, compiled=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for layer, weights in zip(model.model.layers, forward._layers, strict=True):
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert module.weight.untyped_storage().data_ptr() == weights.qkv.untyped_storage().data_ptr()
        for module in (layer.mlp.gate_proj, layer.mlp.up_proj):
            assert module.weight.untyped_storage().data_ptr() == weights.gate_up.untyped_storage().data_ptr()


def test_models_that_compute_otherwise_keep_their_modules() -> None:
    """Rotary frequencies that depend on the length, another activation, another architecture."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert not can_fuse(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dynamic)))
    assert not can_fuse(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")))
    assert not can_fuse(MistralForCausalLM(MistralConfig(**SHAPE)))
