"""The compiled pass: products by tiles, and tokens whose results do not depend on the passes that compute them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services import tiles
from services.domain import SamplingParams
from worker_service.engine.runner import RawLogprobs, Row
from worker_service.engine.torch.compiled_forward import CompiledForward
from worker_service.engine.torch.engine import TorchEngineOptions, load_model
from worker_service.engine.torch.runner import TorchRunner, kv_layout

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
    """The modules of a model that the compiled pass has taken over hold no products."""
    folder = tiny_models["qwen2"]
    model = load_model(folder, TorchEngineOptions(folder, "qwen2"))
    layers = model.num_parameters()
    runner = TorchRunner(model, BLOCKS, kv_layout(model, BLOCK_TOKENS, ""))
    assert isinstance(runner._compiled, CompiledForward)
    products = runner._compiled.constants.weights[:8:2]
    assert sum(product.size for product in products) >= layers - model.num_parameters() > 0
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
