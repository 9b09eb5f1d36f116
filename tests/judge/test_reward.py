"""Reward models behind SGLang's `/classify`: an HTTP double of the one call, and the real server where it is installed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from models.training.tokenizer import VOCAB_SIZE
from models.training.tokenizer import save as save_tokenizer
from penstock.judge_service.scorers.reward.scorer import RewardScorer
from penstock.services.domain.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    Unavailable,
)
from penstock.services.processes import free_port
from penstock.types.judging import JudgedAnswer
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from tests.support import sglang
from tests.support.local_http import served

CHAT = ChatPrompt((ChatMessage("user", "Reverse: abc"),))


def write_reward_model(folder: Path) -> LlamaForSequenceClassification:
    """A random reward model with the shipped tokenizer."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, pad_token_id=258, bos_token_id=256, eos_token_id=257,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(5)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(str(folder))
    save_tokenizer(folder)
    return model


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    write_reward_model(folder)
    return folder


class Endpoint:
    """A server whose reward is the number of tokens; `status` and `body` replace its response."""

    def __init__(self) -> None:
        self.status, self.body, self.requests = 200, None, list[Any]()  # type: tuple[int, Any, list[Any]]
        self.url = ""

    async def classify(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        body = self.body
        if body is None:
            body = [{"embedding": [float(len(ids))], "meta_info": {}} for ids in self.requests[-1]["input_ids"]]
        return web.json_response(body, status=self.status, headers={"Retry-After": "7"})


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    server = Endpoint()
    app = web.Application()
    app.router.add_post("/classify", server.classify)
    async with served(app) as server.url:
        yield server


@pytest.fixture
async def scorer(endpoint: Endpoint, reward_model: Path) -> AsyncIterator[RewardScorer]:
    made = RewardScorer(endpoint.url, reward_model, api_key=None, timeout_s=60, concurrency=2)
    await made.start()
    yield made
    await made.close()


async def test_conversations_are_sent_as_the_template_writes_them(
    endpoint: Endpoint, scorer: RewardScorer, reward_model: Path
) -> None:
    """As token ids, without a second begin token; the score is the reward's logistic function."""
    results = await scorer.score([JudgedAnswer(CHAT, "cba"), JudgedAnswer(TextPrompt("Reverse: abc"), "c")])
    tokenizer = AutoTokenizer.from_pretrained(str(reward_model))
    for ids, answer in zip(endpoint.requests[0]["input_ids"], ("cba", "c"), strict=True):
        chat = [{"role": "user", "content": "Reverse: abc"}, {"role": "assistant", "content": answer}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert results[0].raw == len(endpoint.requests[0]["input_ids"][0])
    assert 50 < results[1].score <= results[0].score <= 100


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (429, {}, Overloaded),
        (503, {}, Overloaded),
        (400, {"error": "too long"}, RequestFailed),
        (500, {}, Unavailable),
        (200, {}, Unavailable),
        (200, [], Unavailable),
        (200, [{"embedding": [1.0, 2.0]}], Unavailable),
        (200, [{"embedding": ["x"]}], Unavailable),
    ],
)
async def test_failures_of_the_server_are_told_apart(
    status: int, body: Any, error: type[Exception], endpoint: Endpoint, scorer: RewardScorer
) -> None:
    endpoint.status, endpoint.body = status, body
    with pytest.raises(error) as caught:
        await scorer.score([JudgedAnswer(CHAT, "cba")])
    if isinstance(caught.value, Overloaded):
        assert caught.value.retry_after_s == 7


async def test_what_the_model_cannot_read_is_refused_by_field(scorer: RewardScorer) -> None:
    with pytest.raises(InvalidRequest, match=r"items\[1\]\.prompt\.token_ids"):
        await scorer.score([JudgedAnswer(CHAT, "c"), JudgedAnswer(TokenPrompt((1,)), "c")])
    with pytest.raises(PromptTooLong, match=r"items\[0\]\.prompt"):
        await scorer.score([JudgedAnswer(CHAT, "c" * 400)])


async def test_a_server_that_does_not_answer_is_left(reward_model: Path) -> None:
    """In time, or at all."""

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    ended = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for url, timeout_s, error in (
        (f"http://127.0.0.1:{port}", 0.2, DeadlineExceeded),
        ("http://127.0.0.1:9", 60.0, Unavailable),
    ):
        scorer = RewardScorer(url, reward_model, api_key=None, timeout_s=timeout_s, concurrency=1)
        await scorer.start()
        with pytest.raises(error):
            await scorer.score([JudgedAnswer(CHAT, "c")])
        await scorer.close()
    ended.set()
    server.close()


@pytest.mark.sglang
async def test_a_real_server_gives_the_models_own_rewards(reward_model: Path, tmp_path: Path) -> None:
    """As transformers computes them from the same conversation."""
    model = LlamaForSequenceClassification.from_pretrained(str(reward_model)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(reward_model))
    with sglang.sglang_server(reward_model, port := free_port(), tmp_path / "log", "--is-embedding"):
        scorer = RewardScorer(f"http://127.0.0.1:{port}", reward_model, api_key=None, timeout_s=60, concurrency=2)
        await scorer.start()
        answers = ("cba", "c", "no idea at all")
        results = await scorer.score([JudgedAnswer(CHAT, answer) for answer in answers])
        await scorer.close()
    for result, answer in zip(results, answers, strict=True):
        chat = [{"role": "user", "content": "Reverse: abc"}, {"role": "assistant", "content": answer}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        assert result.raw == pytest.approx(model(torch.tensor([ids])).logits[0, 0].item(), abs=0.02)
