"""One request through its route, as far as it needs no judge."""

import asyncio
from dataclasses import replace

from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.types.plans import Plan, TierPlan
from tests.support.routed_request import Router, all_tokens


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
    assert (answer.tool_format, answer.tokenizer_digest) == ("hermes", "t")
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
