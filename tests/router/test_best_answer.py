"""The best of a request's answers is delivered: real calls, scripted workers and judges; then whole meshes."""

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from penstock import AsyncPlannerClient
from penstock import Escalated as ClientEscalated
from penstock import Finished as ClientFinished
from penstock import Judged as ClientJudged
from penstock import Tokens as ClientTokens
from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.router_service.generation.tier_times import TierTimes
from penstock.services.domain.errors import DeadlineExceeded, Unavailable
from penstock.services.domain.slo.promises import Promise
from penstock.types.events import Escalated, Judged
from penstock.types.plans import Plan, TierPlan
from penstock.types.replies import TokenFrame
from penstock.types.requests import Resume
from penstock.types.sampling import SamplingParams
from penstock.types.slo import SloFallback
from penstock.types.tools import Tool, ToolUse
from tests.support.mesh import TestMesh
from tests.support.present import present
from tests.support.routed_request import PLAN, PROMPT, TIERS, Router, Score, Served, all_tokens
from tests.support.tier_scene import TOKENS

TEXT = "".join(f"{i} " for i in range(TOKENS))


@pytest.mark.parametrize(
    ("small", "medium", "large", "best"),
    [
        (55.0, 40.0, 30.0, "small"),
        (40.0, 55.0, 30.0, "medium"),
        (40.0, 30.0, 55.0, "large"),
        (55.0, 30.0, 55.0, "large"),
        (55.0, 55.0, 30.0, "medium"),
        (55.0, 40.0, None, "large"),
    ],
)
async def test_the_answer_with_the_highest_score_is_delivered(
    small: float, medium: float, large: float | None, best: str, router: Router
) -> None:
    """Of equal ones the latest, and the last one if it cannot be judged. The client sees tokens of that answer only, after
    all verdicts, of which the last one names the tier."""
    served = await router.serve({"small": small, "medium": medium, "large": large})
    assert served.answer.tier.name == best
    better = best if best != "large" else ""
    assert served.verdicts == [
        ("small", small, False, ""),
        ("medium", medium, False, ""),
        ("large", large, best == "large", better),
    ]
    assert served.output.events[-TOKENS:] == all_tokens(best)
    assert served.output.tokens == all_tokens(best)
    summaries = [answer.summary() for answer in served.answers]
    assert [(s.tier, s.score) for s in summaries] == [("small", small), ("medium", medium), ("large", large)]
    assert [s.tier for s in summaries if s.accepted] == [best]
    attributes = present(served.answers[-1].past().attributes)
    assert attributes.get("penstock.better_tier", "") == better


async def test_only_the_answer_that_is_delivered_is_kept(router: Router) -> None:
    """However many tiers a request visits, the tokens of at most two of its answers are held at a time."""
    held = list[int]()
    take = TierAnswer.take

    def counted(answer: TierAnswer, frame: TokenFrame) -> None:
        take(answer, frame)
        held.append(sum(bool(each.frames) for each in router.answers))

    tiers = (*(TierPlan(f"t{i}", "m", 90.0, 1) for i in range(5)), TierPlan("large", "m", None, 1))
    names = [tier.name for tier in tiers]
    scores: dict[str, Score] = dict(zip(names, (10.0, 50.0, 20.0, 50.0, 30.0, 40.0), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TierAnswer, "take", counted)
        served = await router.serve(scores, Plan(1, tiers, best_answer=True), started=names)
    assert served.answer.tier.name == "t3"
    assert max(held) == 2
    assert [bool(answer.frames) for answer in served.answers] == [name == "t3" for name in names]
    assert [answer.usage().output_tokens for answer in served.answers] == [TOKENS] * 6, "counted all the same"


async def test_without_it_rejected_answers_are_not_kept_and_the_last_tier_is_streamed(router: Router) -> None:
    served = await router.serve({"small": 55.0, "medium": 40.0}, replace(PLAN, best_answer=False))
    assert (served.answer.tier.name, served.judge.asked) == ("large", ["small", "medium"])
    assert [(answer.held, bool(answer.frames)) for answer in served.answers] == [
        (True, False),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize(("medium", "best"), [(45.0, "small"), (55.0, "medium"), (58.0, "medium")])
async def test_an_accepted_answer_is_compared_with_rejected_ones_before_it(
    medium: float, best: str, router: Router
) -> None:
    """Thresholds may fall from tier to tier. The last tier is not asked."""
    plan = replace(PLAN, tiers=(replace(TIERS[0], threshold=60.0), replace(TIERS[1], threshold=40.0), TIERS[2]))
    served = await router.serve({"small": 55.0, "medium": medium}, plan)
    assert served.answer.tier.name == best
    assert served.verdicts[-1] == ("medium", medium, best == "medium", "small" if best == "small" else "")
    assert served.output.tokens == all_tokens(best)
    assert [event.to_tier for event in served.output.of(Escalated)] == ["medium"]


NOTHING_TO_COMPARE: dict[str, tuple[dict[str, Score], dict[str, Any], str]] = {
    "no tier before it has an instance": ({}, {"started": ["large"]}, "large"),
    "the request names a tier": ({}, {"model": "small"}, "small"),
    "the request names the last one": ({}, {"model": "large"}, "large"),
    "the first answer cannot be judged": ({"small": None}, {}, "large"),
    "a resumed answer goes on at its tier": ({}, {"resume": Resume("small", (0, 1, 2))}, "small"),
}


@pytest.mark.parametrize("case", NOTHING_TO_COMPARE)
async def test_an_answer_without_an_earlier_one_streams_unjudged(case: str, router: Router) -> None:
    scores, options, tier = NOTHING_TO_COMPARE[case]
    served = await router.serve(scores, **options)
    assert (served.answer.tier.name, served.answer.held) == (tier, False)
    assert served.judge.asked == (["small"] if "small" in scores else [])
    assert served.output.tokens == all_tokens(tier, 3 if "resume" in options else 0)


@pytest.mark.parametrize(("small", "best"), [(10.0, "small"), (0.0, "large")])
async def test_an_answer_that_a_guard_refuses_has_the_score_0(small: float, best: str, router: Router) -> None:
    served = await router.serve(
        {"small": small, "large": 0.0}, replace(PLAN, tiers=TIERS[::2]), reasons={"large": "repetition"}
    )
    assert served.answer.tier.name == best
    assert served.output.of(Judged)[-1].reason == "repetition"


async def test_without_a_judge_at_the_end_the_last_answer_is_delivered(router: Router) -> None:
    async def leave() -> float:
        router.scene.view.forget("judge")
        return 55.0

    served = await router.serve({"small": leave}, replace(PLAN, tiers=TIERS[::2]))
    assert (served.answer.tier.name, served.judge.asked) == ("large", ["small"])
    assert served.verdicts == [("small", 55.0, False, ""), ("large", None, True, "")]


async def test_a_deadline_that_passes_while_the_last_answer_is_judged_is_an_error(router: Router) -> None:
    async def never() -> float:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(DeadlineExceeded):
        await router.serve({"small": 55.0, "large": never}, replace(PLAN, tiers=TIERS[::2]), within_s=2.0)
    assert not router.output.tokens


async def test_the_last_tier_is_waited_for_although_it_is_held(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tier after it could answer."""
    gives_up: dict[str, bool] = {}
    generate = TierGeneration.generate

    async def recorded(self: TierGeneration, tier: str, *rest: Any, **options: Any) -> Any:
        gives_up[tier] = options["may_give_up"]
        return await generate(self, tier, *rest, **options)

    monkeypatch.setattr(TierGeneration, "generate", recorded)
    await router.serve({"small": 55.0, "large": 70.0}, replace(PLAN, tiers=TIERS[::2]))
    assert gives_up == {"small": True, "large": False}


@pytest.mark.parametrize(
    ("small", "large", "best", "flagged"),
    [
        (40.0, 30.0, "small", True),
        (40.0, 45.0, "large", True),
        (60.0, 30.0, "small", False),
        (60.0, None, "large", False),
    ],
)
async def test_the_delivered_answer_is_flagged_by_its_score(
    small: float, large: float | None, best: str, flagged: bool, router: Router
) -> None:
    """The last answer is not judged a second time for it."""
    plan = replace(PLAN, tiers=TIERS[::2])
    served = await router.serve({"small": small, "large": large}, plan, flag_below=50.0)
    assert served.judge.asked == ["small", "large"]
    assert [(a.tier.name, a.flagged) for a in served.answers] == [
        (tier, flagged and tier == best) for tier in ("small", "large")
    ]
    last = served.output.of(Judged)[-1]
    assert (last.threshold, last.flagged) == (50.0, flagged and best == "large")


class Traced:
    """A traced request. spans: those of its tiers, by the names of these, once they have ended."""

    def __init__(self) -> None:
        self._exporter, self._tracers = InMemorySpanExporter(), TracerProvider()
        self._tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._tracers.get_tracer("t")

    async def serve(self, router: Router, *arguments: Any, **options: Any) -> Served:
        with self.tracer.start_as_current_span("request"):
            return await router.serve(*arguments, tracer=self.tracer, **options)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        ended = [span for span in self._exporter.get_finished_spans() if span.name.startswith("tier ")]
        spans = {span.name.removeprefix("tier "): span for span in ended}
        assert len(spans) == len(ended)
        return spans

    def of(self, name: str) -> dict[str, Any]:
        """An attribute by tier, of the spans that have it."""
        attributes = {tier: span.attributes or {} for tier, span in self.spans.items()}
        return {tier: each[name] for tier, each in attributes.items() if name in each}


@pytest.mark.parametrize(
    ("medium", "large", "best"), [(55.0, 30.0, "medium"), (30.0, 35.0, "small"), (55.0, 60.0, "large")]
)
async def test_spans_say_which_answer_was_delivered(medium: float, large: float, best: str, router: Router) -> None:
    """Each ends once, at the end of its answer: before the next tier begins, although it is known later what became of it."""
    traced = Traced()
    served = await traced.serve(router, {"small": 40.0, "medium": medium, "large": large}, flag_below=100.0)
    assert served.answer.tier.name == best
    assert traced.of("penstock.accepted") == {tier: tier == best for tier in ("small", "medium", "large")}
    assert traced.of("penstock.flagged") == {best: True}
    assert traced.of("penstock.better_tier") == ({} if best == "large" else {"large": best})
    spans = [traced.spans[tier.name] for tier in TIERS]
    times = [time for span in spans for time in (span.start_time, span.end_time)]
    assert None not in times
    assert times == sorted(times, key=lambda time: time or 0)


async def test_a_last_tier_that_fails_is_an_error_as_without_it(router: Router) -> None:
    """A rejected answer is not delivered for want of another one, and its span ends."""
    traced = Traced()
    with pytest.raises(Unavailable):
        await traced.serve(router, {"small": 55.0}, replace(PLAN, tiers=TIERS[::2]), started=["small"])
    assert not router.output.tokens
    assert traced.of("penstock.accepted") == {"small": False, "large": False}
    codes = {tier: span.status.status_code for tier, span in traced.spans.items()}
    assert codes == {"small": StatusCode.UNSET, "large": StatusCode.ERROR}


async def test_calls_of_tools_are_read_from_the_answer_that_is_delivered(router: Router) -> None:
    prompt = replace(PROMPT, tool_use=ToolUse((Tool("f"),)))
    served = await router.serve({"small": 55.0, "large": 30.0}, replace(PLAN, tiers=TIERS[::2]), prompt=prompt)
    assert (served.answer.tier.name, served.answer.content) == ("small", TEXT)


def promise(left_s: float | None, fallback: SloFallback = SloFallback.BEST_EFFORT) -> Promise:
    now_s = asyncio.get_running_loop().time()
    return Promise(None if left_s is None else now_s + left_s, fallback=fallback)


async def test_a_held_last_answer_has_an_slo_to_finish_by(router: Router) -> None:
    """It is due before the request's first token is, and is never declined, since no tier comes after it."""
    for tier in ("small", "large"):
        await router.start(tier)
        router.scene.workers[tier].keeps_slos = tier == "small"
    served = await router.serve(
        {"small": 55.0, "large": 70.0}, replace(PLAN, tiers=TIERS[::2]), started=[], promise=promise(1000.0)
    )
    assert (served.answer.tier.name, served.answer.held) == ("large", True)
    (small,), (large,) = (router.scene.workers[tier].asked for tier in ("small", "large"))
    assert (small.decline_unkept_slo, large.decline_unkept_slo) == (True, False)
    assert large.slo.HasField("time_to_first_token")
    result = present(served.answer.slo_result(asyncio.get_running_loop().time() + 900.0))
    assert result.attained


async def test_one_that_is_to_be_declined_rather_than_late_streams(router: Router) -> None:
    """No request is declined because its answer would be held."""
    served = await router.serve(
        {"small": 55.0}, replace(PLAN, tiers=TIERS[::2]), promise=promise(1000.0, SloFallback.DECLINE)
    )
    assert (served.answer.tier.name, served.answer.held, served.judge.asked) == ("large", False, ["small"])


async def test_a_last_tier_that_would_be_too_late_if_held_streams(router: Router) -> None:
    """By measured times: the first token of a stream is in time, where the whole answer and the judge are not."""
    times, large = TierTimes(), TIERS[2]
    request = RouterRequest("r", "cascade", PROMPT, SamplingParams(), 1e9)
    for _ in range(20):
        times.answered("large", 90.0, 90.5, 93.0)
        times.judged(99.7, 100.0)
    for due_s, held in ((103.4, True), (103.2, False), (None, True)):
        with_slo = replace(request, promise=Promise(due_s))
        assert times.allows_holding_last(with_slo, large, 100.0) is held
    assert times.allows_holding_last(request, large, 100.0)
    late = times.promise(replace(request, promise=Promise(100.1)), TIERS, 2, 100.0, held=True)
    assert late is not None, "the last tier is never skipped"
    assert late.fallback is SloFallback.BEST_EFFORT


GREEDY: Any = {"temperature": 0.0, "max_tokens": 20}
FAST = {"overhead_ms": 0.2, "token_us": 1.0, "context_token_ns": 0.0}
MESH = {
    "tiers": [
        {"name": "small", "model": "sim-small", "threshold": 100, "simulated": FAST | {"reply_tokens": 8}},
        {"name": "large", "model": "sim-large", "simulated": FAST | {"reply_tokens": 1_000_000}},
    ],
    "planner": {"best_answer": True},
    "router": {"judge_timeout_s": 60, "trace_share": 1.0},
}
"""The small tier's answers are complete and never accepted; those of the large one are cut off, which a guard refuses."""


async def test_a_client_sees_which_answer_it_gets(mesh: TestMesh) -> None:
    """Over gRPC: in the last verdict, in the tier of all tokens, and at the end; it is counted as that tier's."""
    async with mesh.client() as client:
        before = {tier.name: tier.answered for tier in (await client.status()).tiers}
        events = [event async for event in client.stream("hello", **GREEDY)]
        after = {tier.name: tier.answered for tier in (await client.status()).tiers}
        kinds = (ClientJudged, ClientEscalated, ClientTokens, ClientFinished)
        shown = [event for event in events if isinstance(event, kinds)]
        first, last = (e for e in shown if isinstance(e, ClientJudged))
        assert (first.tier, first.accepted, first.better_tier) == ("small", False, "")
        assert present(first.score) > 0
        assert (last.tier, last.score, last.reason) == ("large", 0.0, "truncated_answer")
        assert (last.accepted, last.better_tier) == (False, "small")
        tokens = [e for e in shown if isinstance(e, ClientTokens)]
        assert {e.tier for e in tokens} == {"small"}
        assert shown.index(tokens[0]) == 3
        finished = shown[-1]
        assert isinstance(finished, ClientFinished)
        small, large = finished.tiers
        assert (finished.tier, finished.usage) == ("small", small.usage)
        assert [(t.tier, t.accepted) for t in (small, large)] == [("small", True), ("large", False)]
        assert small.usage.output_tokens == sum(len(e.token_ids) for e in tokens) < large.usage.output_tokens
        assert after == before | {"small": before["small"] + 1}
        reply = await client.generate("hello", **GREEDY)
    assert reply.text == "".join(e.text for e in tokens)
    assert reply.tier == "small"


async def test_openais_api_delivers_it_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    """Each of several choices is the best of its own answers."""
    options: Any = {"model": "cascade", "messages": [{"role": "user", "content": "hello"}], **GREEDY}
    whole = await client.chat.completions.create(**options, n=2)
    done: Any = (whole.model_extra or {})["penstock"]
    for choice in done:
        assert choice["tier"] == "small"
        assert [(t["tier"], t["accepted"]) for t in choice["tiers"]] == [("small", True), ("large", False)]
    assert present(whole.usage).completion_tokens == sum(choice["tiers"][0]["completion_tokens"] for choice in done)
    stream = await client.chat.completions.create(**options, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == whole.choices[1].message.content


async def test_a_plan_may_be_set_to_deliver_it_or_not(mesh: TestMesh) -> None:
    """Through SDK, planner, Redis and router."""
    async with mesh.client() as client, AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
        plan = await planner.get_plan()
        assert plan.best_answer, "as the mesh file says"
        for best_answer, tier in ((False, "large"), (True, "small")):
            published = await planner.set_plan(replace(plan, best_answer=best_answer))
            assert published.best_answer is best_answer
            while (await client.status()).plan_revision < published.revision:
                await asyncio.sleep(0.01)
            assert (await client.generate("hello", **GREEDY)).tier == tier
