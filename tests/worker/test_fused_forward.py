"""The fused forward pass computes what transformers' modules compute, also of models read without transformers; its compiled
kernel computes attention over the cache, for any dtype, number of threads and mix of segments."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
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
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.runner import RawLogprobs, Row
from penstock.worker_service.engine.torch import attention
from penstock.worker_service.engine.torch.attention import KernelThreads, KvPool, PagedBatch
from penstock.worker_service.engine.torch.compiled_forward import CompiledForward
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, load_model
from penstock.worker_service.engine.torch.forward import FusedForward
from penstock.worker_service.engine.torch.plain_model import PlainModel, read_config, read_model
from penstock.worker_service.engine.torch.runner import TorchRunner, kv_layout
from penstock.worker_service.engine.torch.step_layout import Segment
from penstock.worker_service.engine.torch.supported import cpu_flags, dtype_on, unsupported
from tests.conftest import FAMILY, ROOT
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
            assert module.weight.untyped_storage().data_ptr() == weights.qkv.weight.untyped_storage().data_ptr()
        for module in (layer.mlp.gate_proj, layer.mlp.up_proj):
            assert module.weight.untyped_storage().data_ptr() == weights.gate_up.weight.untyped_storage().data_ptr()


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


READ_HERE = ("llama", "llama-biases", "qwen2", "qwen3")


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    model_of(name, torch.float32).save_pretrained(str(folder), **options)
    return folder


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def read(folder: Path, dtype: str = "auto") -> PlainModel:
    config = read_config(folder)
    assert config is not None
    return read_model(folder, config, dtype)


@pytest.mark.parametrize("name", READ_HERE)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several files"])
def test_it_computes_what_transformers_model_computes(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    expected, model = model_of(name, torch.float32), read(saved(tmp_path, name, **options))
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(options)
    ours = hidden_states(FusedForward(model, compiled=False), model, None)
    theirs = hidden_states(FusedForward(expected, compiled=False), expected, None)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    hidden = torch.randn(3, expected.config.hidden_size)
    assert torch.equal(model.lm_head(hidden), expected.lm_head(hidden))
    assert model.num_parameters() == expected.num_parameters()


def test_a_head_that_is_the_embedding_is_one_tensor() -> None:
    model = read(FAMILY / "small")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32, "as config.json says, though the file is in bfloat16"
    assert read(FAMILY / "small", "bfloat16").dtype == torch.bfloat16


def test_half_precision_is_for_what_has_instructions_for_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    changed(folder, dtype="bfloat16")
    able, plain = frozenset({"avx2", "amx_bf16"}), frozenset({"avx2", "avx512_fp16"})
    assert (dtype_on("cpu", "auto", folder, able), dtype_on("cpu", "auto", folder, plain)) == ("auto", "float32")
    assert dtype_on("cuda:1", "auto", folder, plain) == "auto"
    assert dtype_on("cpu", "bfloat16", folder, plain) == "bfloat16"
    assert "fpu" in cpu_flags() or "fp" in cpu_flags()


@pytest.mark.parametrize("name", ["llama3-rope", "llama-yarn"])
def test_other_rotary_positions_are_left_to_transformers(tmp_path: Path, name: str) -> None:
    assert read_config(saved(tmp_path, name)) is None
    assert not isinstance(load_model(tmp_path, TorchEngineOptions(tmp_path, "m")), PlainModel)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},
        {"model_type": "gpt2"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"quantization_config": {"bits": 4}},
        {"use_sliding_window": True},
        {"num_key_value_heads": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert read_config(saved(tmp_path)) is not None
    changed(tmp_path, **fields)
    assert read_config(tmp_path) is None


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    weights = load_file(saved(tmp_path) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for value, problem in ((None, f"no weights '{name}'"), (torch.zeros(2, 2), f"'{name}' is")):
        rest = {key: tensor for key, tensor in weights.items() if key != name}
        save_file(rest if value is None else rest | {name: value}, tmp_path / "model.safetensors")
        with pytest.raises(EngineUnusable, match=problem):
            load_model(tmp_path, TorchEngineOptions(tmp_path, "m"))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineUnusable, match=str(tmp_path)):
        load_model(tmp_path, TorchEngineOptions(tmp_path, "m"))


HEADS, KV_HEADS, DIM = 6, 2, 10  # groups of three; no multiple of the kernel's unrolling


def random_step(
    seed: int, dtype: torch.dtype, block_tokens: int
) -> tuple[KvPool, list[Segment], np.ndarray, torch.Tensor, list[torch.Tensor]]:
    """Decodes, short chunks and prompts over a random cache: pool, segments, tables, qkv, and each segment's attention."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [(rng.randint(0, 60), rng.choice((1, 1, 1, 3, 8, 9, 20))) for _ in range(7)]
    lengths[0] = (0, 12)  # a prompt from its beginning
    width = max(-(-(start + count) // block_tokens) for start, count in lengths)
    free = list(range(len(lengths) * width))
    rng.shuffle(free)
    tables = np.array(free, np.int64).reshape(len(lengths), width)
    pool = KvPool(1, len(free), block_tokens, KV_HEADS, DIM, dtype, "cpu")
    segments, parts, expected = [], [], []
    first = 0
    for i, (start, count) in enumerate(lengths):
        end = start + count
        q = torch.randn(count, HEADS, DIM, generator=generator).to(dtype)
        k, v = (torch.randn(end, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
        for position in range(start):
            block, place = int(tables[i, position // block_tokens]), position % block_tokens
            pool.k[0][block, :, :, place] = k[position]
            pool.v[0][block, :, place] = v[position]
        segments.append(Segment(first, count, start, i))
        parts.append(torch.cat((q, k[start:], v[start:]), 1).flatten(1))
        mask = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]
        query, key, value = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        exact = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.4, enable_gqa=True)
        expected.append(exact.squeeze(0).transpose(0, 1).flatten(1))
        first += count
    return pool, segments, tables, torch.cat(parts), expected


def attended(
    seed: int, dtype: torch.dtype, block_tokens: int, threads: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of a random step, and what it must be."""
    pool, segments, tables, qkv, expected = random_step(seed, dtype, block_tokens)
    paged = PagedBatch(pool, segments, tables, KernelThreads(threads) if threads is not None else None)
    paged.place([torch.from_numpy(np.ascontiguousarray(index)) for index in paged.indices])
    return paged.attend(0, qkv, HEADS, 0.4), torch.cat(expected)


@pytest.mark.parametrize("block_tokens", [5, 16])
@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_attention_is_that_of_each_sequence_alone(
    dtype: torch.dtype, tolerance: float, threads: int | None, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MIN_THREAD_WORK", 1)
    for seed in range(6):
        result, expected = attended(seed, dtype, block_tokens, threads)
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_THREAD_WORK", 1)
    for seed in range(6):
        one, _ = attended(seed, torch.float32, 16, 1)
        for threads in (2, 3, 7):
            assert torch.equal(attended(seed, torch.float32, 16, threads)[0], one)


def test_threads_get_parts_of_about_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each work item is in one part; no part has more than its share and one item. Little work is not divided."""
    pool = KvPool(1, 64, 16, KV_HEADS, DIM, torch.float32, "cpu")
    segments = [Segment(i, 1, start, i) for i, start in enumerate((3, 900, 40, 7, 300))]
    paged = PagedBatch(pool, segments, np.zeros((5, 60), np.int64), KernelThreads(3))
    assert paged._cuts == [0, 10]
    monkeypatch.setattr(attention, "MIN_THREAD_WORK", 1)
    cuts = PagedBatch(pool, segments, np.zeros((5, 60), np.int64), KernelThreads(3))._cuts
    assert cuts[0] == 0
    assert cuts[-1] == 10
    assert cuts == sorted(cuts)
    work = np.repeat([s.start + 1 for s in segments], KV_HEADS)
    shares = [work[a:b].sum() for a, b in pairwise(cuts)]
    assert max(shares) <= work.sum() / 3 + work.max()


@pytest.mark.slow
def test_a_shipped_model_is_served_without_the_imports_of_transformers_models() -> None:
    code = """
import sys
from pathlib import Path
from penstock.services.clock import SystemClock
from penstock.worker_service.engine.torch.engine import TorchEngineOptions
from penstock.worker_service.engine.torch.engine import torch_core
torch_core(TorchEngineOptions(Path("models/family/small"), "small", kv_tokens=1024), SystemClock())
print([name for name in ("torch._dynamo", "transformers.modeling_utils") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
