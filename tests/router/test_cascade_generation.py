"""One request through its route, as far as it needs no judge. Real calls, scripted workers."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from opentelemetry.metrics import NoOpMeter
from opentelemetry.trace import NoOpTracer

from penstock.router_service.clients.judge_client import JudgeClient
from penstock.router_service.domain.events import RouterEvent, RouterRequest
from penstock.router_service.generation.cascade_generation import CascadeGeneration
from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.services.mesh_schema import MeshRouter
from penstock.types.plans import Plan, TierPlan
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.sampling import SamplingParams
from tests.support.tier_scene import TOKENS, Scene

LIMIT_S = 60.0
PROMPT = ChatPrompt((ChatMessage("user", "count"),))


@dataclass
class Output:
    """What the client gets."""

    events: list[RouterEvent] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def event(self, event: RouterEvent) -> None:
        self.events.append(event)

    def answer(self, tier: str, frame: TokenFrame) -> None:
        self.token_ids += frame.token_ids

    async def sent(self) -> None:
        pass


@pytest.fixture(autouse=True)
def plan(scene: Scene) -> None:
    scene.view.follow(Plan(1, (TierPlan("only", "m", None, 1),)))


async def answer_of(scene: Scene) -> TierAnswer:
    """The answer to a request, after all of its tokens have come."""
    judge = JudgeClient(
        scene.channels,
        scene.pool,
        NoOpTracer(),
        NoOpMeter("t"),
        MeshRouter(judge_timeout_s=1.0, judge_concurrency=1, judge_open_s=1.0),
    )
    cascade = CascadeGeneration(scene.view, scene.tier(), judge, NoOpTracer())
    sampling = SamplingParams(seed=1, max_tokens=TOKENS)
    deadline_s = asyncio.get_running_loop().time() + LIMIT_S
    output, answers = Output(), list[TierAnswer]()
    answer = await cascade.generate(RouterRequest("r", "cascade", PROMPT, sampling, deadline_s), output, answers)
    assert answers == [answer]
    assert output.token_ids == list(range(TOKENS))
    return answer


async def start(scene: Scene, **card: str) -> None:
    """Start a worker whose model has these features."""
    worker = await scene.start("a")
    scene.hear(worker, model=replace(worker.record.model, **card))  # type: ignore[type-var]


async def test_an_answer_is_read_in_the_formats_of_its_instances_model(scene: Scene) -> None:
    """Its reasoning is told from its content."""
    await start(scene, reasoning_format="think_opened", tool_format="hermes", tokenizer_digest="t")
    answer = await answer_of(scene)
    assert (answer.tool_format, answer.tokenizer_digest) == ("hermes", "t")
    assert answer.reasoning is not None
    assert answer.reasoning.copy().push("a thought</think>an answer") == ("a thought", "an answer")


async def test_a_model_without_marks_has_no_reasoning(scene: Scene) -> None:
    await start(scene)
    assert (await answer_of(scene)).reasoning is None


async def test_an_answer_is_complete_although_its_instance_has_left_the_mesh_before_the_first_token(
    scene: Scene,
) -> None:
    """Nothing is known of its model then."""
    await start(scene, reasoning_format="think_opened", tool_format="hermes", tokenizer_digest="t")
    answering = asyncio.create_task(answer_of(scene))
    while not scene.workers["a"].asked:
        await asyncio.sleep(0)
    scene.view.forget("a")
    answer = await answering
    assert (answer.tool_format, answer.tokenizer_digest, answer.reasoning) == ("", "", None)


async def test_the_summary_of_an_answer_has_the_time_that_it_took(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await start(scene)
    answer = await answer_of(scene)
    assert answer.accepted
    assert 0 < answer.summary().time_s <= loop.time() - began_s
