"""GGUF models on llama.cpp: the same text as on torch, its own tokens, and what it refuses. More: test_engine_contract."""

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.clock import SystemClock
from penstock.services.gguf import gguf_file, read_metadata
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import CoreLimits, EngineCore
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.llamacpp import binding
from penstock.worker_service.engine.llamacpp.engine import LlamaCppEngineOptions, llamacpp_core
from penstock.worker_service.engine.llamacpp.model import LlamaContext, LlamaModel, Part
from penstock.worker_service.engine.llamacpp.runner import LlamaRunner
from penstock.worker_service.engine.llamacpp.sequences import IDLE_TOKENS, Sequences
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core
from penstock.worker_service.scheduling.batching import BatchLimits
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY
from tests.support.gguf import write_gguf
from tests.support.real_models import FOLDER

CACHED = {file.stem: file for file in FOLDER.glob("*.gguf")}
"""Real models, where somebody has put them."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
TEXTS = (
    "naïve café 12345 日本語のテキスト, 汉字   \n\n\t x  y\r\n\r\n z",
    "I'LL you're WE'VE don't 'S; emoji 👩‍👩‍👧‍👦 🏳️‍🌈 ½ ² ٣",
    "    def f(x):\n        return x**2  # comment\n\n\n" + " " * 40 + "1,234.56$ 100% #tag @me `x` ~~ ^^ | <= >=",
    "<tool_call>\n{}\n</tool_call><|im_start|>user\nЩлюз! हिन्दी ไทย<|im_end|><|end|>",
    Path(__file__).read_text(),
)

Family = Callable[[str], Path]


def tokens_of(core: EngineCore, prompts: dict[str, tuple[int, ...]], sampling: SamplingParams) -> dict[str, list[int]]:
    """The replies to prompts that arrive together."""
    replies: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        core.add(GenerationRequest(name, TokenPrompt(prompt), sampling), list(prompt))
    while not core.idle:
        for name, output in core.step():
            if isinstance(output, Exception):
                raise output
            if isinstance(output, TokenFrame):
                replies[name] += output.token_ids
    return replies


def conversations(count: int) -> dict[str, tuple[int, ...]]:
    """Prompts of bytes, some of which begin alike."""
    rng = random.Random(3)
    begins = [[rng.randrange(256) for _ in range(rng.randrange(8, 40))] for _ in range(4)]
    return {f"r{i}": (*begins[i % 4], *(rng.randrange(256) for _ in range(rng.randrange(1, 30)))) for i in range(count)}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.usefixtures("precise_kv")
def test_replies_are_those_of_torch(gguf_family: Family, sampling: SamplingParams) -> None:
    """One draw in 144 may fall between what the two round to."""
    prompts = conversations(6)
    ours, _ = llamacpp_core(LlamaCppEngineOptions(gguf_family("small"), "small", kv_tokens=4096), SystemClock())
    torch, _ = torch_core(TorchEngineOptions(FAMILY / "small", "small", kv_tokens=4096), SystemClock())
    replies, expected = tokens_of(ours, prompts, sampling), tokens_of(torch, prompts, sampling)
    differing = [name for name in prompts if replies[name] != expected[name]]
    assert len(differing) <= (sampling is SAMPLED), [(replies[name], expected[name]) for name in differing]


@pytest.mark.usefixtures("precise_kv")
def test_few_sequences_and_little_kv_change_nothing(gguf_family: Family) -> None:
    """More conversations than llama.cpp has numbers for, with shared prefixes, preempted, and asked again."""
    file = gguf_family("small")
    model, tokenizer = LlamaModel(file), HfTokenizer(file)
    prompts = conversations(24)

    def core(blocks: int, sequences: int, running: int) -> EngineCore:
        runner = LlamaRunner(model, blocks, 8, "", batch=16, sequences=sequences)
        limits = CoreLimits(BatchLimits(running, 16), len(prompts), 512)
        return EngineCore(runner, tokenizer, BlockPool(blocks, 8), limits, SystemClock())

    alone = tokens_of(core(600, 200, 1), prompts, GREEDY)
    tight = core(40, 5, 7)
    assert tokens_of(tight, prompts, GREEDY) == alone
    assert tight.scheduler.preemptions > 0
    assert tokens_of(tight, prompts, GREEDY) == alone
    assert tight.scheduler.pool.free == 40


def test_a_sequence_that_is_idle_leaves_the_cache_and_comes_back(gguf_family: Family) -> None:
    """Every step goes through all cells in use. What comes back is what was there."""
    context = LlamaContext(LlamaModel(gguf_family("small")), 1024, 5, batch=128)
    sequences = Sequences(context, 4, block_tokens=8, block_bytes=1 << 20)
    nothing, tokens = context.state_bytes(0), list(range(1, 101))
    number = sequences.place("ended", range(13), 0, 100, set())
    context.decode([Part(tokens, 0, number, 1)])
    expected = context.decode([Part([7], 100, number, 1)]).copy()
    full = context.state_bytes(number)
    for step in range(IDLE_TOKENS + 1):
        sequences.begin_step({"runs"}, 1)
        runs = sequences.place("runs", range(20, 40), step, step + 1, set())
        context.decode([Part([1], step, runs, 1)])
        assert (context.state_bytes(number) == full) == (step < IDLE_TOKENS - 1)
    assert context.state_bytes(number) == nothing
    sequences.begin_step({"follows"}, 1)
    number = sequences.place("follows", range(13), 100, 101, set())
    np.testing.assert_array_equal(context.decode([Part([7], 100, number, 1)]), expected)


def test_a_long_step_has_all_idle_sequences_leave_the_cache_before(gguf_family: Family) -> None:
    context = LlamaContext(LlamaModel(gguf_family("small")), 1024, 9, batch=128)
    sequences = Sequences(context, 8, block_tokens=8, block_bytes=1 << 20)
    nothing, named = context.state_bytes(0), [f"ended-{i}" for i in range(6)]
    sequences.begin_step(named, 96)
    numbers = [sequences.place(name, range(2 * i, 2 * i + 2), 0, 16, set()) for i, name in enumerate(named)]
    context.decode([Part(range(1, 17), 0, number, 1) for number in numbers])
    sequences.begin_step({"long", named[0]}, 128)
    sizes = [context.state_bytes(number) for number in numbers]
    assert sizes[0] > nothing
    assert sizes[1:] == [nothing] * 5


def test_a_model_drafts_for_another_one(gguf_family: Family) -> None:
    file = gguf_family("medium")
    options: dict[str, Any] = {"kv_tokens": 4096, "max_running": 4}
    core, _ = llamacpp_core(
        LlamaCppEngineOptions(file, "m", drafters=(gguf_family("small"),), **options), SystemClock()
    )
    alone, _ = llamacpp_core(LlamaCppEngineOptions(file, "m", **options), SystemClock())
    tokenizer = core.tokenizer
    prompts = {f"q{i}": tuple(tokenizer.encode_text(f"What is {i} + 30?")) for i in range(6)}
    replies = tokens_of(core, prompts, GREEDY)
    assert replies == tokens_of(alone, prompts, GREEDY)
    assert core.proposals.state().counts["model"].failures == 0


def tokenized(model: LlamaModel, text: str) -> list[int]:
    """llama.cpp's own tokens of a text, those that begin it included."""
    api, data = model.api, text.encode()
    tokens = (binding.Token * (len(data) + 8))()
    vocab = ctypes.c_void_p(api.llama_model_get_vocab(model.handle))
    count = api.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, True)
    assert count >= 0
    return list(tokens[:count])


@pytest.mark.parametrize("name", ["small", *(pytest.param(name, marks=pytest.mark.slow) for name in CACHED)])
def test_tokens_are_those_of_llama_cpp(gguf_family: Family, name: str) -> None:
    file = CACHED.get(name) or gguf_family("small")
    model, tokenizer = LlamaModel(file), HfTokenizer(file)
    for text in TEXTS:
        tokens = tokenizer.encode_text(text)
        assert tokens == tokenized(model, text)
        stream = tokenizer.stream()
        assert "".join(map(stream, tokens)) == tokenizer.decode(tokens)


def test_marks_of_tool_calls_have_text(tmp_path: Path) -> None:
    """Also where the file calls them control tokens."""
    file = write_gguf(FAMILY / "small", tmp_path / "m.gguf")
    tokens = read_metadata(file)["tokenizer.ggml.tokens"]
    tokens[tokens.index("<|tool|>")] = "<tool_call>"
    marked = HfTokenizer(write_gguf(FAMILY / "small", tmp_path / "marked.gguf", tokenizer__ggml__tokens=tokens))
    assert marked.decode(marked.encode_text("<tool_call>{}<|end|>")) == "<tool_call>{}"


def unusable(file: Path, **options: Any) -> str:
    with pytest.raises(EngineUnusable) as caught:
        llamacpp_core(LlamaCppEngineOptions(file, "m", **options), SystemClock())
    return str(caught.value)


def test_what_is_no_model_is_refused_with_the_reason(tmp_path: Path, gguf_family: Family) -> None:
    good = gguf_family("small")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model")
    assert "not a GGUF file" in unusable(other)
    other.write_bytes(good.read_bytes()[:4000])
    assert "cut off" in unusable(other)
    unknown = write_gguf(FAMILY / "small", tmp_path / "unknown.gguf", general__architecture="alpaca")
    assert "unknown model architecture: 'alpaca'" in unusable(unknown)
    words = write_gguf(FAMILY / "small", tmp_path / "words.gguf", tokenizer__ggml__pre="another")
    assert "'another'" in unusable(words)


def test_another_library_is_refused_by_name_and_version(tmp_path: Path, gguf_family: Family) -> None:
    text = tmp_path / "libllama.so"
    assert "no file" in unusable(gguf_family("small"), library=str(text))
    text.write_text("no library")
    assert binding.BUILT_FOR in unusable(gguf_family("small"), library=str(text))
    import _ctypes

    assert binding.BUILT_FOR in unusable(gguf_family("small"), library=_ctypes.__file__)  # a library, but another one


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert gguf_file(tmp_path) == tmp_path / "big-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    assert gguf_file(tmp_path) is None
    assert gguf_file(tmp_path / "other.gguf") == tmp_path / "other.gguf"
