"""A judge that has too much to do is not given more: its clients decide without it, quickly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from grpc import aio
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NoOpTracer

from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.router_service.clients.circuit_breaker import FAILURES_TO_OPEN
from penstock.router_service.clients.judge_client import ROUNDS, JudgeClient, JudgedScore
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import Overloaded, Unavailable, invalid
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.errors import to_status
from penstock.services.grpc_types import Context
from penstock.services.mesh_schema.router import MeshRouter
from penstock.types.judging import JudgedAnswer
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason
from tests.support.measured import sums

Behaviour = Callable[[], Awaitable[float]]


class Judge(judge_pb2_grpc.JudgeServiceServicer):
    """A judge over gRPC that behaves as the test says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.asked, self.under_way, self.most = behaviour, 0, 0, 0
        self.lists = True

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:  # noqa: N802 - the contract
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return pb.ScoreResponse(results=[pb.ScoreResult(score=await self.behaviour())], scorer="s")
        except (Overloaded, Unavailable, ValueError) as error:
            told = error if not isinstance(error, ValueError) else invalid("items[0]", "unsound")
            await context.abort_with_status(to_status(told))
            raise AssertionError from None
        finally:
            self.under_way -= 1

    async def ListScorers(self, request: pb.ListScorersRequest, context: Context) -> pb.ListScorersResponse:  # noqa: N802
        if not self.lists:
            await context.abort_with_status(to_status(Unavailable("away")))
        return pb.ListScorersResponse(
            scorers=[
                pb.ScorerInfo(name="s", needs_logprobs=True, tiers=["large"]),
                pb.ScorerInfo(name="plain"),
            ],
            default_scorer="s",
        )


class Setup:
    """Judges, and one client to them."""

    def __init__(self, judges: list[Judge], client: JudgeClient, reader: InMemoryMetricReader, view: MeshView) -> None:
        self.judges, self.client, self._reader, self.view = judges, client, reader, view

    async def score(self, within_s: float = 60.0) -> JudgedScore | None:
        deadline_s = asyncio.get_running_loop().time() + within_s
        return await self.client.score("s", JudgedAnswer(TextPrompt("p"), "a", "small", FinishReason.STOP), deadline_s)

    def failures(self) -> dict[str, int]:
        """By reason."""
        counted = sums(self._reader, "penstock.router.judge_failures")
        return {str(dict(labels)["penstock.reason"]): int(value) for labels, value in counted.items()}


Start = Callable[..., Awaitable[Setup]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(*behaviours: Behaviour, timeout_s: float = 10.0, concurrency: int = 64) -> Setup:
            view, judges = MeshView(), list[Judge]()
            for i, behaviour in enumerate(behaviours):
                server, judge = aio.server(), Judge(behaviour)
                judge_pb2_grpc.add_JudgeServiceServicer_to_server(judge, server)
                port = server.add_insecure_port("127.0.0.1:0")
                await server.start()
                stack.push_async_callback(server.stop, None)
                judges.append(judge)
                view.hear(InstanceRecord(f"judge-{i}", Role.JUDGE, f"127.0.0.1:{port}", 1.0, 1, 3600.0), 0.0)
            channels = await stack.enter_async_context(ChannelPool())
            reader = InMemoryMetricReader()
            meter: Meter = MeterProvider([reader]).get_meter("test")
            limits = MeshRouter(judge_timeout_s=timeout_s, judge_concurrency=concurrency, judge_open_s=3600.0)
            client = JudgeClient(channels, InstancePool(view, 2.0), NoOpTracer(), meter, limits)
            return Setup(judges, client, reader, view)

        yield make


async def scores() -> float:
    return 70.0


async def full() -> float:
    raise Overloaded("full", 3600.0)


async def away() -> float:
    raise Unavailable("away")


async def unsound() -> float:
    raise ValueError


async def never() -> float:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_judge_that_is_full_is_asked_once_and_then_left_alone(start: Start) -> None:
    mesh = await start(full)
    assert [await mesh.score() for _ in range(5)] == [None] * 5
    assert mesh.judges[0].asked == 1
    assert mesh.failures() == {"refused": 1, "open": 4}


async def test_another_judge_takes_what_one_refuses(start: Start) -> None:
    mesh = await start(full, scores)
    assert [await mesh.score() for _ in range(3)] == [JudgedScore(70.0, "s")] * 3
    assert mesh.judges[0].asked == 1
    assert mesh.failures() == {}


async def test_a_judge_that_does_not_answer_in_time_is_left_alone(start: Start) -> None:
    """After a few time-outs in a row; each costs its request the time, and none of the next ones."""
    mesh = await start(never, timeout_s=1.0)
    assert [await mesh.score() for _ in range(FAILURES_TO_OPEN + 4)] == [None] * (FAILURES_TO_OPEN + 4)
    assert mesh.judges[0].asked == FAILURES_TO_OPEN
    assert mesh.failures() == {"timeout": FAILURES_TO_OPEN, "open": 4}


async def test_callers_in_a_hurry_open_nothing(start: Start) -> None:
    """A client cannot take the judge from the others by deadlines that no judge can keep, nor by going away."""
    mesh = await start(never)
    for _ in range(FAILURES_TO_OPEN * 2):
        assert await mesh.score(within_s=0.02) is None
    leaving = [asyncio.create_task(mesh.score()) for _ in range(FAILURES_TO_OPEN * 2)]
    while mesh.judges[0].under_way < len(leaving):
        await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    mesh.judges[0].behaviour = full
    assert await mesh.score(within_s=0.5) is None  # refused: it could not have been judged in so little time
    mesh.judges[0].behaviour = scores
    assert await mesh.score() == JudgedScore(70.0, "s")


async def test_judgements_under_way_are_limited(start: Start) -> None:
    """The others wait here, where their time runs out without any work for the judge."""
    mesh = await start(never, concurrency=4)
    waiting = [asyncio.create_task(mesh.score(within_s=2.0)) for _ in range(32)]
    assert await asyncio.gather(*waiting) == [None] * 32
    assert mesh.judges[0].most == mesh.judges[0].asked == 4
    assert mesh.failures() == {"timeout": 32}
    mesh.judges[0].behaviour = scores
    assert await mesh.score() == JudgedScore(70.0, "s")


async def test_a_judge_that_cannot_be_reached_is_tried_again_for_a_moment(start: Start) -> None:
    """It may be starting anew; that is no overload."""
    mesh = await start(away)
    assert await mesh.score() is None
    assert mesh.judges[0].asked == ROUNDS
    mesh.judges[0].behaviour = scores
    assert await mesh.score() == JudgedScore(70.0, "s")
    assert mesh.failures() == {"unavailable": 1}


async def test_an_answer_that_cannot_be_judged_is_its_own_fault(start: Start) -> None:
    mesh = await start(unsound)
    for _ in range(FAILURES_TO_OPEN * 2):
        assert await mesh.score() is None
    assert mesh.failures() == {"invalid": FAILURES_TO_OPEN * 2}
    mesh.judges[0].behaviour = scores
    assert await mesh.score() == JudgedScore(70.0, "s")


async def test_a_tier_that_grades_has_the_time_to_read_that_it_needs(start: Start) -> None:
    """In addition to the usual time, by the speed that its workers have measured."""

    async def reads() -> float:
        await asyncio.sleep(0.4)
        return 70.0

    mesh = await start(reads, timeout_s=0.2)
    assert await mesh.client.needs_logprobs("s")
    assert await mesh.score() is None
    card = ModelCard("large", "m", "d", "e", 8192, 1, 16, 8)
    slow = Load(prompt_tokens_per_s=0.5)  # a token for prompt and answer
    worker = InstanceRecord("w", Role.WORKER, "host:1", 1.0, 1, 3600.0, model=card, load=slow)
    mesh.view.hear(worker, 0.0)
    assert await mesh.score() == JudgedScore(70.0, "s")


async def test_without_a_judge_there_is_no_score(start: Start) -> None:
    mesh = await start()
    assert await mesh.score() is None
    assert mesh.failures() == {"unavailable": 1}


async def test_logprobs_are_taken_while_no_judge_says_whether_it_needs_them(start: Start) -> None:
    """A judge that misses them gives no score at all; one that ignores them loses nothing."""
    mesh = await start(scores)
    mesh.judges[0].lists = False
    assert await mesh.client.needs_logprobs("plain")
    mesh.judges[0].lists = True
    assert not await mesh.client.needs_logprobs("plain")
    assert await mesh.client.needs_logprobs("")
    assert not await mesh.client.needs_logprobs("of no judge")
