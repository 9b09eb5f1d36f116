"""The fused forward pass computes what transformers' modules compute, and takes no more memory."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.services import tiles
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.runner import RawLogprobs, Row
from penstock.worker_service.engine.torch.attention import KernelThreads, KvPool, PagedBatch
from penstock.worker_service.engine.torch.compiled_forward import CompiledForward
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, load_model
from penstock.worker_service.engine.torch.forward import FusedForward
from penstock.worker_service.engine.torch.runner import TorchRunner, kv_layout
from penstock.worker_service.engine.torch.step_layout import Segment
from penstock.worker_service.engine.torch.supported import unsupported
from tests.support.module_forward import ModuleForward

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


def hidden_states(
    forward: FusedForward | ModuleForward, model: PreTrainedModel, threads: KernelThreads | None
) -> list[torch.Tensor]:
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


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), "hidden_act 'gelu'"),
        (MistralConfig(**SHAPE), "model type 'mistral'"),
    ],
)
def test_models_that_compute_otherwise_are_refused(tmp_path: Path, config: PretrainedConfig, problem: str) -> None:
    """Rotary frequencies that depend on the length, another activation, another architecture."""
    config.save_pretrained(str(tmp_path))
    assert problem in unsupported(tmp_path)


SCORED = SamplingParams(temperature=0.0, top_logprobs=3)
BLOCK_TOKENS, BLOCKS = 4, 64


def runner_of(folder: Path) -> TorchRunner:
    model = load_model(folder, TorchEngineOptions(folder, folder.name))
    return TorchRunner(model, BLOCKS, kv_layout(model, BLOCK_TOKENS, ""))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 8), (47, 33), (64, 192), (100, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_by_tiles_is_the_product(outputs: int, inputs: int, biased: bool) -> None:
    rng = np.random.default_rng(outputs)
    weight = rng.normal(size=(outputs, inputs)).astype(np.float32)
    bias = rng.normal(size=outputs if biased else 0).astype(np.float32)
    for rows in range(1, 2 * tiles.ROWS + 2):
        x = rng.normal(size=(rows, inputs)).astype(np.float32)
        out = np.full((rows, outputs), np.nan, np.float32)
        tiles.product(x, tiles.panels(weight), bias, out)
        np.testing.assert_allclose(out, x @ weight.T + (bias if biased else 0), atol=1e-4)


def test_no_bit_of_a_row_depends_on_the_other_rows() -> None:
    rng = np.random.default_rng(1)
    x, none = rng.normal(size=(3 * tiles.ROWS, 192)).astype(np.float32), np.empty(0, np.float32)
    weight = tiles.panels(rng.normal(size=(75, 192)).astype(np.float32))
    whole = np.empty((len(x), 75), np.float32)
    tiles.product(x, weight, none, whole)
    for first in range(len(x)):
        for count in range(1, min(tiles.ROWS + 1, len(x) - first) + 1):
            part = np.empty((count, 75), np.float32)
            tiles.product(x[first : first + count], weight, none, part)
            assert (part == whole[first : first + count]).all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_no_bit_of_a_token_depends_on_the_passes_that_compute_it(name: str, tiny_models: dict[str, Path]) -> None:
    """A prompt in one pass, in parts, token by token, and each of these beside other sequences."""
    rng = random.Random(3)
    prompt = rng.choices(range(256), k=45)
    others = [rng.choices(range(256), k=count) for count in (1, 19, 4)]
    results = list[list[Sequence[RawLogprobs]]]()
    for cuts in ([45], [7, 1, 30, 7], [1] * 45):
        for beside in ([], others):
            runner, done, logprobs = runner_of(tiny_models[name]), 0, list[Sequence[RawLogprobs]]()
            for count in cuts:
                tokens = prompt[done : done + count]
                rows = [Row(tokens, done, list(range(12)), count, SCORED, 0)]
                rows += [
                    Row(other, 0, list(range(20 + 8 * i, 28 + 8 * i)), 1, SCORED, 0) for i, other in enumerate(beside)
                ]
                logprobs += [[each] for each in runner.run(rows[::-1])[-1].logprobs]
                done += count
            results.append(logprobs)
    for other in results[1:]:
        assert other == results[0]


def test_the_weights_are_in_memory_once(tiny_models: dict[str, Path]) -> None:
    """The modules of a model that the compiled pass has taken over hold no products, and no embedding."""
    folder = tiny_models["qwen2"]
    model = load_model(folder, TorchEngineOptions(folder, "qwen2"))
    layers = model.num_parameters()
    runner = TorchRunner(model, BLOCKS, kv_layout(model, BLOCK_TOKENS, ""))
    assert isinstance(runner._compiled, CompiledForward)
    constants, head = runner._compiled.constants, runner._compiled.head
    kept = {id(product): product.size for product in (*constants.weights[:8:2], constants.embedding, head)}
    assert sum(kept.values()) >= layers - model.num_parameters() > 0
    assert (head is constants.embedding) == model.config.tie_word_embeddings
    assert not model.lm_head.weight.numel()
    assert not model.model.embed_tokens.weight.numel()
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            assert not module.weight.numel()


def test_sampled_tokens_are_drawn_from_the_same_bits(tiny_models: dict[str, Path]) -> None:
    """A drafted reply that is verified in one pass is the reply that is decoded token by token."""
    sampled = replace(SCORED, temperature=0.8, seed=5)
    prompt, reply = [1, 2, 3, 4, 5], list[int]()
    runner, verifier = (runner_of(tiny_models["llama"]) for _ in range(2))
    blocks = list(range(16))
    logprobs = list[RawLogprobs]()
    for k in range(24):
        tokens = prompt if k == 0 else reply[-1:]
        (result,) = runner.run([Row(tokens, 0 if k == 0 else len(prompt) + k - 1, blocks, 1, sampled, k)])
        reply += result.tokens
        logprobs += result.logprobs
    (verified,) = verifier.run([Row([*prompt, *reply[:-1]], 0, blocks, 24, sampled, 0)])
    assert list(verified.tokens) == reply
    assert list(verified.logprobs) == logprobs
