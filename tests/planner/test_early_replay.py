"""Early checks of plans are those of routers: the router's own code, token by token, beside the planner's replay."""

import asyncio
import math

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider

from planner_service.early_checks import EarlyRule, checked_answers
from router_service.generation.early_rejection import EarlyCheckCounter, EarlyRejection
from services.domain.early_checks import EarlyCheck

COUNTER = EarlyCheckCounter(MeterProvider().get_meter("test"))


async def routed(rule: EarlyRule, scores: list[float], length: int) -> tuple[int | None, int]:
    """(tokens when a router rejects an answer of `length` tokens, parts that it had scored). scores: by check."""
    tokens, due_at, asked = 0, 0, 0
    verdict = asyncio.Event()

    async def score() -> float | None:
        nonlocal due_at, asked
        known = [s for check, s in zip(rule.checks, scores, strict=True) if check.after_tokens <= tokens]
        due_at, asked = tokens + rule.meanwhile_tokens, asked + 1
        if rule.meanwhile_tokens:
            verdict.clear()
            await verdict.wait()
        return None if math.isnan(known[-1]) else known[-1]

    early = EarlyRejection("small", rule.checks, score, COUNTER)
    rejecting = asyncio.ensure_future(early.rejecting_score())
    try:
        for tokens in range(1, length):  # with the last token the answer is finished
            early.has(tokens)
            if tokens == due_at:
                verdict.set()
            for _ in range(9):
                await asyncio.sleep(0)
            if rejecting.done() and rejecting.result() is not None:
                return tokens, asked
        return None, asked
    finally:
        rejecting.cancel()


@pytest.mark.parametrize("seed", range(40))
async def test_an_answer_is_cut_where_a_router_cuts_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    after = sorted(rng.choice(np.arange(1, 30), int(rng.integers(1, 5)), replace=False).tolist())
    rule = EarlyRule(tuple(EarlyCheck(tokens, 50.0) for tokens in after), int(rng.integers(0, 15)))
    scores = np.where(rng.random(len(after)) < 0.1, np.nan, rng.uniform(30, 100, len(after))).tolist()
    length = int(rng.integers(1, 40))
    known = [score if tokens < length else math.nan for tokens, score in zip(after, scores, strict=True)]
    checked = checked_answers(rule, after, np.array([known]), np.array([length]))
    at, asked = await routed(rule, scores, length)
    assert (at or length, at is not None, asked) == (checked.tokens[0], checked.rejected[0], checked.parts[0])
