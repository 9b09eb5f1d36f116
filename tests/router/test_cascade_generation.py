"""One request through its route, as far as it needs no judge."""

import asyncio
import logging
from dataclasses import replace

import pytest

from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services.acceptance.wait_price import Price
from penstock.services.domain.errors import Unavailable
from penstock.services.domain.score_prediction import ScorePredictor
from penstock.types.events import Escalated, EscalationReason
from penstock.types.plans import Plan, TierPlan
from penstock.types.prompts import TokenPrompt
from penstock.types.requests import Resume
from penstock.types.tools import Tool, ToolUse
from tests.support.routed_request import PROMPT, TIERS, Router, all_tokens

ONE_TIER = Plan(1, (TierPlan("only", "m", None, 1),))
PASSED_OVER = Plan(1, (replace(TIERS[0], skip_below=50.0), TIERS[2]))
PREDICTOR = ScorePredictor(("small",), 2**8, (-3.0,), {}, 100, (1.0,))
"""It expects 5 of the small tier."""


async def start(router: Router, **card: str) -> None:
    """Start a worker whose model has these features."""
    worker = await router.scene.start("a")
    router.scene.hear(worker, model=replace(worker.record.model, **card))  # type: ignore[type-var]


async def answer_of(router: Router) -> TierAnswer:
    """The answer to a request, after all of its tokens have come."""
    served = await router.serve({}, Plan(1, (TierPlan("only", "m", None, 1),)), started=())
    assert served.answers == [served.answer]
    assert served.output.tokens == all_tokens("only")
    return served.answer


async def test_an_answer_is_read_in_the_formats_of_its_instances_model(router: Router) -> None:
    """Its reasoning is told from its content."""
    await start(router, reasoning_format="think_opened", tool_format="hermes", tokenizer_digest="t")
    answer = await answer_of(router)
    assert (answer.instance_id, answer.tool_format, answer.tokenizer_digest) == ("a", "hermes", "t")
    assert answer.reasoning is not None
    assert answer.reasoning.copy().push("a thought</think>an answer") == ("a thought", "an answer")


async def test_a_model_without_marks_has_no_reasoning(router: Router) -> None:
    await start(router)
    assert (await answer_of(router)).reasoning is None


async def test_an_answer_is_complete_although_its_instance_has_left_the_mesh_before_the_first_token(
    router: Router,
) -> None:
    """Nothing is known of its model then."""
    await start(router, reasoning_format="think_opened", tool_format="hermes", tokenizer_digest="t")
    answering = asyncio.create_task(answer_of(router))
    while not router.scene.workers["a"].asked:
        await asyncio.sleep(0)
    router.scene.view.forget("a")
    answer = await answering
    assert (answer.tool_format, answer.tokenizer_digest, answer.reasoning) == ("", "", None)


async def test_the_summary_of_an_answer_has_the_time_that_it_took(router: Router) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await start(router)
    answer = await answer_of(router)
    assert answer.accepted
    assert 0 < answer.summary().time_s <= loop.time() - began_s


@pytest.mark.parametrize(
    ("streamed", "tier", "waits"),
    [(True, "only", False), (False, "only", True), (True, "small", True)],
)
async def test_tokens_wait_for_each_other_where_nobody_reads_them_as_they_come(
    router: Router, streamed: bool, tier: str, waits: bool
) -> None:
    """Those of an answer that is judged first, and of one that is sent whole."""
    plan = ONE_TIER if tier == "only" else Plan(1, (TIERS[0], TIERS[2]))
    await router.serve({"small": 95.0}, plan, started=[t.name for t in plan.tiers], streamed=streamed)
    (asked,) = router.scene.workers[tier].asked
    assert asked.HasField("output_interval") == waits


@pytest.mark.parametrize("needs_logprobs", [True, False])
async def test_log_probabilities_are_computed_where_the_scorer_reads_them(router: Router, needs_logprobs: bool) -> None:
    """Of the chosen tokens alone."""
    plan = Plan(1, (TIERS[0], TIERS[2]), scorer="s")
    await router.serve({"small": 95.0}, plan, started=("small", "large"), needs_logprobs=needs_logprobs)
    (asked,) = router.scene.workers["small"].asked
    assert asked.sampling.HasField("top_logprobs") == needs_logprobs
    assert asked.sampling.top_logprobs == 0


async def test_a_prompt_of_tokens_has_no_predicted_score(router: Router) -> None:
    served = await router.serve(
        {"small": 95.0}, PASSED_OVER, started=("small", "large"), predictor=PREDICTOR, prompt=TokenPrompt((1, 2))
    )
    assert served.answer.tier.name == "small"


async def test_a_tier_is_passed_over_by_its_predicted_score(router: Router) -> None:
    served = await router.serve({}, PASSED_OVER, started=("small", "large"), predictor=PREDICTOR)
    assert [answer.tier.name for answer in served.answers] == ["large"]
    (passed,) = served.output.of(Escalated)
    assert passed == Escalated("small", "large", EscalationReason.PREDICTED_SCORE_LOW, passed.predicted_score)
    assert passed.predicted_score == pytest.approx(4.74, abs=0.01)


async def test_a_plan_that_needs_predictions_which_are_not_made_is_warned_of(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        served = await router.serve({"small": 95.0}, PASSED_OVER, started=("small", "large"))
    assert served.answer.tier.name == "small"
    assert "score_predictor is not set" in caplog.text


async def test_a_price_of_waiting_does_without_predictions(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    waiting = WaitingPrice(Price(5.0), lambda _tier, _tokens: 0.0)
    with caplog.at_level(logging.WARNING):
        served = await router.serve({"small": 95.0}, waiting=waiting)
    assert (served.answer.tier.name, served.answer.predicted) == ("small", {})
    assert "score_predictor" not in caplog.text


async def test_calls_are_read_in_the_whole_of_a_resumed_answer(router: Router) -> None:
    """Those that its client has the beginning of, too."""
    prompt = replace(PROMPT, tool_use=ToolUse((Tool("look"),)))
    begun = Resume("only", (0, 1, 2), "<tool_call>")
    served = await router.serve({}, ONE_TIER, started=("only",), prompt=prompt, resume=begun)
    assert served.answer.text.startswith("<tool_call>")


async def test_without_a_plan_nothing_can_be_served(router: Router) -> None:
    with pytest.raises(Unavailable, match="no plan"):
        await router.serve({}, None, started=())


async def test_nothing_is_predicted_where_there_is_one_tier(router: Router) -> None:
    waiting = WaitingPrice(Price(5.0), lambda _tier, _tokens: 0.0)
    served = await router.serve({}, ONE_TIER, started=("only",), predictor=PREDICTOR, waiting=waiting)
    assert served.answer.predicted == {}
