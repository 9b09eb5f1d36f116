"""Escalation drafts on the shipped family: passes and speed where a tier verifies the answer of the tier below.

Two parts. *Engines*: the answers of each tier to held-out prompts are the drafts of the next tier's engine, in turns with and
without; the engine runs alone and replies to one prompt after another, so that its passes are counted exactly. Those answers
count as escalated that are wrong. *Cascade*: a mesh of processes as shipped, with and without the setting in turns; what is
escalated there is the judge's decision.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.meshes import absolute_paths, mesh_of
from benchmarks.spread import median_and_range
from penstock import AsyncClient, Reply
from penstock.judge_service.scoring.comparison import same
from penstock.services.mesh_file import read_mesh_data
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import Draft, GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine

ROOT = Path(__file__).parents[1]
FAMILY, HELD_OUT = ROOT / "models" / "family", ROOT / "models" / "heldout.jsonl"
PAIRS = (("small", "medium"), ("medium", "large"))
PROMPTS, QUICK_PROMPTS, CASCADE_PROMPTS = 500, 40, 200
BATCH = 32  # in which the drafts are generated, and texts compared
GREEDY = SamplingParams(temperature=0.0, max_tokens=512)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    text: str
    accepted: int
    rejected: int


def run(rounds: int) -> None:
    figures = _engines(rounds, PROMPTS)
    figures["cascade"] = asyncio.run(_cascade(_questions(CASCADE_PROMPTS), rounds))
    print(f"{figures['cascade']['tiers']}\n{report.write('escalation_drafts', figures)}")


def run_quick(_rounds: int) -> None:
    """The engines only: two meshes take longer to start than they are measured."""
    _engines(1, QUICK_PROMPTS)


def _questions(count: int) -> list[dict[str, str]]:
    return [row for row in map(json.loads, HELD_OUT.read_text().splitlines()) if "prompt" in row][:count]


def _engines(rounds: int, count: int) -> dict[str, Any]:
    """The figures of the engines, which are written and shown."""
    pairs = [asyncio.run(_pair(pair, _questions(count), rounds)) for pair in PAIRS]
    figures: dict[str, Any] = {"prompts": count, "rounds": rounds, "pairs": pairs}
    path = report.write("escalation_drafts", figures)
    groups = [f"{pair['from_tier']} to {pair['to_tier']}" for pair in pairs]
    series = {
        "passes": [(pair["passes_ratio"],) * 3 for pair in pairs],
        "tokens per second of CPU": [median_and_range(pair["tokens_per_s_ratios"]) for pair in pairs],
    }
    plot = report.bars("escalation_drafts", "Escalated replies, with a draft over without", groups, series, "ratio")
    for pair in pairs:
        shown = ("passes_ratio", "tokens_per_s_ratio", "same_text", "same_text_counts")
        print(f"{pair['from_tier']} to {pair['to_tier']}: " + ", ".join(f"{name} {pair[name]}" for name in shown))
    print(f"{path}\n{plot}")
    return figures


async def _pair(pair: tuple[str, str], questions: Sequence[dict[str, str]], rounds: int) -> dict[str, Any]:
    from_tier, to_tier = pair
    engine = await _engine(from_tier)
    drafts = await _answers(engine, questions, [None] * len(questions), "draft")
    digest = engine.tokenizer.digest
    await engine.close()
    engine = await _engine(to_tier)
    given = [Draft("", draft.tokens, digest) for draft in drafts]
    plain = await _answers(engine, questions, [None] * len(questions), "plain")
    drafted = await _answers(engine, questions, given, "drafted")
    same_texts = sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True))
    escalated = [
        i
        for i, (question, draft) in enumerate(zip(questions, drafts, strict=True))
        if not same("final-answer", draft.text, question["answer"])
    ]
    passes, seconds = {True: list[int](), False: list[int]()}, {True: list[float](), False: list[float]()}
    alone = list[Answer]()
    for number in range(rounds):
        for with_draft in (False, True) if number % 2 else (True, False):
            before, began = engine.steps, time.process_time()
            answers = [
                await _answer(engine, f"{number}-{with_draft}-{i}", questions[i], given[i] if with_draft else None)
                for i in escalated
            ]
            passes[with_draft].append(engine.steps - before)
            seconds[with_draft].append(time.process_time() - began)
            if with_draft:
                alone = answers
    await engine.close()
    same_alone = sum(a.tokens == plain[i].tokens for i, a in zip(escalated, alone, strict=True))
    ratios = [without / drafted_s for without, drafted_s in zip(seconds[False], seconds[True], strict=True)]
    tokens = sum(len(answer.tokens) for answer in alone)
    return {
        "from_tier": from_tier,
        "to_tier": to_tier,
        "escalated": len(escalated),
        "output_tokens": tokens,
        "common_prefix_share": round(
            sum(_common(given[i].token_ids, plain[i].tokens) for i in escalated) / max(1, tokens), 3
        ),
        "accepted_share": round(sum(answer.accepted for answer in alone) / max(1, tokens), 3),
        "rejected_per_token": round(sum(answer.rejected for answer in alone) / max(1, tokens), 3),
        "passes": {"without": passes[False][-1], "with": passes[True][-1]},
        "passes_ratio": round(passes[False][-1] / passes[True][-1], 2),
        "cpu_s": {"without": seconds[False], "with": seconds[True]},
        "tokens_per_s_ratio": round(statistics.median(ratios), 2),
        "tokens_per_s_ratios": [round(ratio, 3) for ratio in ratios],
        "same_text": same_texts == len(questions) and same_alone == len(escalated),
        "same_text_counts": {f"batch {BATCH}": [same_texts, len(questions)], "batch 1": [same_alone, len(escalated)]},
    }


async def _engine(tier: str) -> LoopEngine:
    engine = torch_engine(
        TorchEngineOptions(FAMILY / tier, tier, kv_tokens=65_536, max_running=BATCH, max_queued=PROMPTS)
    )
    await engine.start()
    return engine


async def _answers(
    engine: LoopEngine, questions: Sequence[dict[str, str]], drafts: Sequence[Draft | None], name: str
) -> list[Answer]:
    """The answers to all questions, in batches."""
    return await asyncio.gather(
        *(
            _answer(engine, f"{name}-{i}", question, draft)
            for i, (question, draft) in enumerate(zip(questions, drafts, strict=True))
        )
    )


async def _answer(engine: LoopEngine, name: str, question: dict[str, str], draft: Draft | None) -> Answer:
    prompt = ChatPrompt((ChatMessage("user", question["prompt"]),))
    tokens, text, usage = list[int](), "", None
    async for event in engine.generate(GenerationRequest(name, prompt, GREEDY, draft=draft)):
        if isinstance(event, TokenFrame):
            tokens += event.token_ids
            text += event.text
        elif isinstance(event, EngineFinished):
            usage = event.usage
    assert usage is not None
    return Answer(tuple(tokens), text, usage.accepted_draft_tokens, usage.rejected_draft_tokens)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def _cascade(questions: Sequence[dict[str, str]], rounds: int) -> dict[str, Any]:
    """The running cascade: tokens per second of the replies of later tiers; latency of the first tier's accepted answers."""
    replies: dict[bool, list[list[Reply]]] = {True: [], False: []}
    for number in range(rounds):
        for with_drafts in (False, True) if number % 2 else (True, False):
            replies[with_drafts].append(await _mesh_replies(questions, with_drafts=with_drafts))
    tiers = []
    for _, tier in PAIRS:
        rates = {on: [_rate(tier, each) for each in replies[on]] for on in replies}
        ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True) if b]
        tiers.append(
            {
                "to_tier": tier,
                "replies": sum(any(t.tier == tier for t in reply.tiers) for reply in replies[True][-1]),
                "tokens_per_s": rates[True],
                "tokens_per_s_without": rates[False],
                "tokens_per_s_ratio": round(statistics.median(ratios), 2) if ratios else None,
            }
        )
    first = PAIRS[0][0]
    accepted = {
        on: [statistics.median(r.total_s for r in each if r.tier == first) for each in replies[on]] for on in replies
    }
    texts = {on: [reply.text for reply in replies[on][-1]] for on in replies}
    return {
        "tiers": tiers,
        "accepted_latency_s": {"with": accepted[True], "without": accepted[False]},
        "same_text": texts[True] == texts[False],
        "draft_tokens": {
            "accepted": sum(t.usage.accepted_draft_tokens for r in replies[True][-1] for t in r.tiers),
            "rejected": sum(t.usage.rejected_draft_tokens for r in replies[True][-1] for t in r.tiers),
        },
    }


async def _mesh_replies(questions: Sequence[dict[str, str]], *, with_drafts: bool) -> list[Reply]:
    """The greedy replies of a fresh mesh, one after another."""
    content = absolute_paths(read_mesh_data(ROOT / "mesh.yaml"), ROOT)
    for tier in content["tiers"]:
        tier["escalation_drafts"] = with_drafts
        tier.pop("skip_below", None)  # rejected answers are what is measured
    content["router"].pop("score_predictor", None)
    async with mesh_of(content) as mesh, AsyncClient(mesh.addresses.grpc) as client:
        return [await client.generate(question["prompt"], temperature=0.0) for question in questions]


def _rate(tier: str, replies: Sequence[Reply]) -> float:
    """Output tokens per second at a tier, of all replies that it gave."""
    parts = [summary for reply in replies for summary in reply.tiers if summary.tier == tier]
    total_s = sum(part.time_s for part in parts)
    return round(sum(part.usage.output_tokens for part in parts) / total_s, 1) if total_s else 0.0
