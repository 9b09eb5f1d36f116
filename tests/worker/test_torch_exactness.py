"""Greedy text of the torch engine is transformers' `generate`, token for token, however it is computed."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.training import tasks
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.interface import EngineUnusable, LastBlocks
from penstock.worker_service.engine.runner import Row
from penstock.worker_service.engine.torch.runner import TorchRunner
from tests.conftest import FAMILY, TIERS
from tests.worker.test_torch_speculation import build, run_all

TINY = ("llama", "qwen2", "qwen3")
MODELS = ("small", *TINY)
"""Each architecture, and real weights, of which one size is enough: the sizes of the family differ in numbers alone."""
MOST = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST)


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path]
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """(folder, prompts, transformers' greedy replies). Random models have no end token in reach: they run on."""
    name: str = request.param
    shipped = name in TIERS
    folder = FAMILY / name if shipped else tiny_models[name]
    core = build(folder)
    if shipped:
        long = [p.prompt for p in tasks.single_turns(40, seed=3) if len(p.reply) >= MOST][:8]
        prompts = [core.tokenizer.encode(ChatPrompt((ChatMessage("user", prompt),))) for prompt in long]
    else:
        rng = random.Random(5)
        prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(8)]
        prompts += [prompts[0][:9] + prompts[1], prompts[0][:9] + prompts[2]]
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    replies = []
    with torch.inference_mode():
        for ids in prompts:
            out = model.generate(torch.tensor([ids]), max_new_tokens=MOST, do_sample=False)
            replies.append(out[0, len(ids) :].tolist())
    return folder, prompts, replies


WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_step_tokens": 13, "kv_block_tokens": 5},
    "one_by_one_token": {"max_step_tokens": 1, "max_running": 2},
    "through_torch": {"compiled": False},
    "gathered": {"kernel": False},
    "gathered_chunked": {"kernel": False, "max_step_tokens": 37, "kv_block_tokens": 4},
}


OF_EACH_ARCHITECTURE = ("batched", "chunked", "through_torch", "gathered_chunked")
"""The compiled pass, the kernel and the gathered path on each; how a batch is cut into steps has nothing to do with it."""


@pytest.mark.parametrize(
    ("reference", "way"),
    [
        *itertools.product(("small",), WAYS),
        *itertools.product(TINY, OF_EACH_ARCHITECTURE),
        ("medium", "batched"),
        pytest.param("large", "batched", marks=pytest.mark.slow),
    ],
    indirect=["reference"],
)
def test_greedy_text_is_transformers_own(reference: tuple[Path, list[list[int]], list[list[int]]], way: str) -> None:
    folder, prompts, wanted = reference
    assert run_all(build(folder, **WAYS[way]), prompts, GREEDY, together=64) == wanted


def tokens_of_a_step(core: EngineCore) -> list[int]:
    return [token for _, event in core.step() if isinstance(event, TokenFrame) for token in event.token_ids]


def moved_reply(source: EngineCore, target: EngineCore, prompt: list[int], after: int) -> list[int]:
    """The tokens of a reply that moves after so many: everything at once, the request between two steps."""
    asked = GenerationRequest("r", TokenPrompt(tuple(prompt)), GREEDY)
    source.add(asked, prompt)
    said: list[int] = []
    while len(said) < after:
        said += tokens_of_a_step(source)
    stopped = source.transfers.pause("r", 0)
    present = target.transfers.reserve("t", source.runner.kv_layout, stopped.tokens[:-1])
    target.enter(asked, prompt, "t", stopped.tokens, LastBlocks(present, stopped.data[present:]))
    source.leave("r")
    while not target.idle:
        said += tokens_of_a_step(target)
    return said


@pytest.mark.parametrize("reference", MODELS, indirect=True)
def test_export_and_import_change_nothing(reference: tuple[Path, list[list[int]], list[list[int]]]) -> None:
    """Every reply moves to another engine after its k-th token, k different for each."""
    folder, prompts, wanted = reference
    source, target = build(folder), build(folder)
    for i, ids in enumerate(prompts):
        moved_at = 1 + i % max(1, len(wanted[i]) - 1)
        if moved_at < len(wanted[i]):
            assert moved_reply(source, target, ids, moved_at) == wanted[i]


@pytest.mark.slow
def test_bfloat16_blocks_survive_the_journey(tiny_models: dict[str, Path]) -> None:
    source, target, other = (build(tiny_models["llama"], dtype="bfloat16") for _ in range(3))
    assert source.runner.kv_layout.dtype == "bfloat16"
    assert source.runner.read_blocks([0]).nbytes == source.runner.kv_layout.block_bytes
    prompt = list(range(1, 40))
    whole = run_all(other, [prompt], GREEDY)[0]
    assert len(whole) == MOST
    assert moved_reply(source, target, prompt, after=5) == whole


def test_a_folder_that_cannot_be_served_says_why(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    with pytest.raises(EngineUnusable, match=r"no config.json"):
        build(tmp_path)
    config = (tiny_models["llama"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"llama"', '"gpt2"'))
    with pytest.raises(EngineUnusable, match="gpt2"):
        build(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_pass_computes_the_hidden_states_of_the_fused_one(name: str, tiny_models: dict[str, Path]) -> None:
    """Parts of prompts and decodes of several sequences in one step, behind the same KV."""
    folder = FAMILY / name if name in TIERS else tiny_models[name]
    rng = random.Random(7)
    rows = [(rng.choices(range(256), k=count), start) for count, start in ((1, 30), (5, 12), (3, 0), (1, 7))]
    results = []
    for compiled in (True, False):
        core = build(folder, compiled=compiled, kv_block_tokens=4)
        runner = core.runner
        assert isinstance(runner, TorchRunner)
        assert (runner.compiled_draft() is not None) == compiled
        step = []
        for i, (tokens, start) in enumerate(rows):
            blocks = list(range(i * 16, i * 16 + 16))
            if start:
                runner.run([Row(list(range(start)), 0, blocks, 0, GREEDY, 0)])
            step.append(Row(tokens, start, blocks, len(tokens), replace(GREEDY, top_logprobs=2), 0))
        results.append(runner.run(step))
    for one, other in zip(*results, strict=True):
        assert one.tokens == other.tokens
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert (a.chosen, *a.top) == pytest.approx((b.chosen, *b.top), abs=1e-4)
