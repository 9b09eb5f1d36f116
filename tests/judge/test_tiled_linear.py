"""A judge's linear layers in tiles: torch's own results but for rounding, and only where they suit the model."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from penstock.judge_service.scorers.judge_model.tiled_linear import TiledLinear, use_tiles
from tests.conftest import FAMILY


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiled(model: torch.nn.Module) -> int:
    return sum(isinstance(module, TiledLinear) for module in model.modules())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 96), (2, 7, 96), (150, 96)])
def test_the_products_are_torchs(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(96, 70, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(TiledLinear(linear)(x), linear(x), rtol=1e-5, atol=1e-5)
        flipped = x.transpose(-1, -2).contiguous().transpose(-1, -2)  # the same numbers, in another order in memory
        torch.testing.assert_close(TiledLinear(linear)(flipped), linear(x), rtol=1e-5, atol=1e-5)


def test_the_shipped_judge_reads_the_same() -> None:
    ids = torch.tensor([[(7 * i) % 250 for i in range(90)]])
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(str(FAMILY / "judge"), dtype="auto", local_files_only=True).eval()
        for _ in range(2)
    )
    use_tiles(ours.base_model)
    assert tiled(ours) == 7 * ours.config.num_hidden_layers
    with torch.inference_mode():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_other_models_keep_their_layers() -> None:
    """Other types of numbers, several threads, and models of whose code nothing is known."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    half = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
    use_tiles(half.base_model)
    assert tiled(half) == 0
    unknown = Qwen2ForCausalLM(Qwen2Config(**shape))
    unknown.config.model_type = "another"
    use_tiles(unknown.base_model)
    assert tiled(unknown) == 0
    torch.set_num_threads(2)
    threads = Qwen2ForCausalLM(Qwen2Config(**shape))
    use_tiles(threads.base_model)
    assert tiled(threads) == 0
    torch.set_num_threads(1)
    use_tiles(threads.base_model)
    assert tiled(threads) == 7
