"""One tier's reply over instances that fail: the table of failures is carried out. Real calls, scripted workers."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry.context import Context
from opentelemetry.metrics import NoOpMeter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracer, Tracer

from penstock.router_service.clients.bid_client import BidClient
from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.domain.failures import FAILURES_TO_EJECT, FailureHistory
from penstock.router_service.generation.attempt import FIRST_STALL_S, METHOD, MoveStalls, TierDone
from penstock.router_service.generation.reply_assembler import TierEvent
from penstock.router_service.generation.tier_generation import MAX_TRACED_CALLS, TierGeneration
from penstock.router_service.migration.bidding import MoveAgent
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services import errors, telemetry
from penstock.services.background import end
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InstanceDraining,
    InternalError,
    MessageTooLarge,
    NotFound,
    NotServed,
    Overloaded,
    PenstockError,
    PoisonRequest,
    PromptTooLong,
    RequestFailed,
    Unavailable,
    invalid,
)
from penstock.services.domain.mesh_view import MeshView
from penstock.services.mesh_schema import MeshRouter, MeshStages
from penstock.types.events import InstanceChanged, TierStarted
from penstock.types.mesh_status import ReplyMoved
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import PROGRESS_TOKENS, Draft, GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import MoveAdvice, NotMoved
from tests.support.called_events import called
from tests.support.scripted_worker_servicer import PLACES, Act, Script, ScriptedWorker

TOKENS = 40
LONG_AGO = -1e9


@dataclass
class Seen:
    token_ids: list[int]
    instances: list[str]
    done: TierDone
    reasons: list[str]
    """Of the changes of instance."""


class Scene:
    """Workers by name, least loaded first, as one router sees them."""

    def __init__(self, stack: AsyncExitStack, channels: ChannelPool, sessions: MultiplexerPool) -> None:
        self._stack, self._channels, self._sessions = stack, channels, sessions
        self.view = MeshView()
        self.view.connect([], None, LONG_AGO)
        self.pool = InstancePool(self.view, ejection_s=1000.0)
        self.policy = MeshRouter(tier_wait_s=0.0, max_attempts=4, max_refusals=4, max_deaths=2)
        self.workers: dict[str, ScriptedWorker] = {}
        self._version = 0
        self.received: dict[str, list[int]] = {}

    async def start(self, name: str, *scripts: Script, tier: str = "only") -> ScriptedWorker:
        worker = ScriptedWorker(  # type: ignore[abstract]  # it serves what routers call here, no more
            name, deque(scripts), requests=len(self.workers), tier=tier, received=self._tokens_of
        )
        self.workers[name] = await self._stack.enter_async_context(worker.serving())
        self.hear(worker)
        return worker

    def _tokens_of(self, try_id: str) -> int:
        return len(self.received[try_id.partition(":")[0]])

    def hear(self, worker: ScriptedWorker, **changes: object) -> None:
        self._version += 1
        record = replace(worker.record, sequence=self._version, **changes)  # type: ignore[arg-type]
        self.view.hear(record, asyncio.get_running_loop().time())
        self.pool.view_changed()

    def tier(self, silence_s: float = 30.0, tracer: Tracer | None = None) -> TierGeneration:
        client = WorkerClient(self._channels, self._sessions, silence_s)
        agent = MoveAgent(
            self.view,
            BidClient(self._channels),
            NoOpTracer(),
            NoOpMeter("t"),
            MeshStages(bid_timeout_s=1.0, turn_timeout_s=1.0),
        )
        return TierGeneration(self.pool, client, agent, tracer or NoOpTracer(), self.policy, NoOpMeter("t"))

    async def reply(
        self,
        request_id: str = "r",
        *,
        tier: str = "only",
        may_give_up: bool = False,
        history: FailureHistory | None = None,
        silence_s: float = 30.0,
        generation: TierGeneration | None = None,
        parent: Context | None = None,
        draft: Draft | None = None,
        within_s: float = 300.0,
    ) -> Seen:
        """A whole reply, each of its tokens once."""
        token_ids, instances, reasons = list[int](), list[str](), list[str]()
        self.received[request_id] = token_ids
        sampling = SamplingParams(seed=1, max_tokens=TOKENS)
        # no prompt is known anywhere
        request = GenerationRequest(request_id, TextPrompt(request_id), sampling, draft=draft)
        deadline_s = asyncio.get_running_loop().time() + within_s

        def on_event(event: TierEvent) -> None:
            match event:
                case TierStarted():
                    instances.append(event.instance_id)
                case InstanceChanged():
                    assert event.offset == len(token_ids)
                    instances.append(event.to_instance_id)
                    reasons.append(event.reason)

        done = await (generation or self.tier(silence_s)).generate(
            tier,
            request,
            deadline_s,
            parent if parent is not None else Context(),
            on_event=on_event,
            on_tokens=lambda frame: token_ids.extend(frame.token_ids),
            may_give_up=may_give_up,
            history=history,
        )
        assert token_ids == list(range(TOKENS)), "each token once"
        return Seen(token_ids, instances, done, reasons)

    @property
    def tried(self) -> dict[str, int]:
        return {name: len(worker.asked) for name, worker in self.workers.items()}

    @property
    def ejected(self) -> set[str]:
        return {name for name in self.workers if self.pool.is_ejected(name)}


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack, asyncio.timeout(300):
        channels = await stack.enter_async_context(ChannelPool())
        sessions = await stack.enter_async_context(MultiplexerPool(channels))
        yield Scene(stack, channels, sessions)


async def test_a_death_ejects_the_instance_that_died_and_the_reply_goes_on_at_the_next_token(scene: Scene) -> None:
    await scene.start("a", [5, Act.DIE])
    await scene.start("b")
    seen = await scene.reply()
    assert seen.instances == ["a", "b"]
    assert scene.ejected == {"a"}
    assert list(scene.workers["b"].asked[0].resume_token_ids) == list(range(5))


async def test_after_a_move_it_is_the_target_that_is_ejected(scene: Scene) -> None:
    """The reply began at a and moved to b, which dies: a is fit to take it back."""
    source = await scene.start("a", [20, Act.HAND_OVER])
    target = await scene.start("b", [5])
    tier = scene.tier()
    request = GenerationRequest("r", TextPrompt("hello"), SamplingParams(seed=1, max_tokens=TOKENS))
    deadline_s = asyncio.get_running_loop().time() + 300
    token_ids, instances, moving, history = list[int](), list[str](), None, FailureHistory()

    async def generated(call: Callable[[Any], None]) -> TierDone:
        return await tier.generate(
            "only",
            request,
            deadline_s,
            Context(),
            on_event=call,
            on_tokens=call,
            may_give_up=False,
            history=history,
        )

    async with aclosing(called(generated)) as events:
        async for event in events:
            if isinstance(event, TokenFrame):
                token_ids += event.token_ids
                if len(token_ids) == 20:
                    target.transferred.set_result(20)
                    moving = asyncio.create_task(tier.move("r", target.record, "asked for"))
            elif isinstance(event, InstanceChanged):
                instances.append(event.to_instance_id)
                if event.moved:
                    await target.server.stop(None)
    assert moving is not None
    assert isinstance(await moving, ReplyMoved)
    assert token_ids == list(range(TOKENS))
    assert instances == ["b", "a"]
    assert scene.ejected == {"b"}
    assert history.deaths == 1, "it had five tokens from b, whatever it had from a"
    assert [a.request_id for a in source.asked[:1]] == [a.request_id for a in target.asked], "a move keeps the name"


async def test_targets_that_die_in_moves_count_and_the_reply_stays_where_it_is(scene: Scene) -> None:
    """Two targets died of its moves: it is not moved to a third, and goes on to its end at the source."""
    proceed = asyncio.Event()
    await scene.start("a", [3, proceed, 1000, Act.FINISH])
    targets = [await scene.start(name, [Act.DIE]) for name in "bc"]
    third = await scene.start("d")
    history, tier = FailureHistory(), scene.tier()
    reading = asyncio.create_task(scene.reply(history=history, generation=tier))
    while not scene.workers["a"].asked:
        await asyncio.sleep(0)
    for deaths, target in enumerate(targets, 1):
        move = asyncio.create_task(tier.move("r", target.record, "asked for"))
        while history.deaths < deaths:
            await asyncio.sleep(0)
        await end(move)
    assert isinstance(await tier.move("r", third.record, "asked for"), NotMoved)
    proceed.set()
    assert (await reading).instances == ["a"]
    assert scene.tried == {"a": 1, "b": 1, "c": 1, "d": 0}
    assert scene.ejected == {"b", "c"}


async def test_a_reply_that_dies_after_its_last_token_is_complete(scene: Scene) -> None:
    await scene.start("a", [TOKENS, Act.DIE])
    await scene.start("b")
    seen = await scene.reply()
    assert seen.done.reason is FinishReason.LENGTH
    assert seen.done.usage.output_tokens == TOKENS
    assert scene.tried == {"a": 1, "b": 0}


async def test_a_request_that_two_instances_died_of_is_not_tried_on_a_third(scene: Scene) -> None:
    for name in "abc":
        await scene.start(name, [Act.DIE])
    with pytest.raises(PoisonRequest):
        await scene.reply()
    assert scene.tried == {"a": 1, "b": 1, "c": 0}
    assert scene.ejected == {"a", "b"}


async def test_how_many_may_die_of_a_request_is_a_setting(scene: Scene) -> None:
    scene.policy = scene.policy.model_copy(update={"max_deaths": 3})
    for name in "abcd":
        await scene.start(name, [Act.DIE])
    with pytest.raises(PoisonRequest) as caught:
        await scene.reply()
    assert caught.value.deaths == 3
    assert scene.tried == {"a": 1, "b": 1, "c": 1, "d": 0}
    assert scene.ejected == {"a", "b"}, "one request ejects two at most"


async def test_deaths_count_over_all_tiers_of_a_request(scene: Scene) -> None:
    await scene.start("a", [Act.DIE], tier="small")
    await scene.start("b", [Act.DIE], tier="large")
    await scene.start("c", tier="large")
    history = FailureHistory()
    with pytest.raises(Unavailable):
        await scene.reply(tier="small", history=history, may_give_up=True)
    with pytest.raises(PoisonRequest):
        await scene.reply(tier="large", history=history)
    assert scene.tried["c"] == 0


async def test_a_reply_that_ran_well_where_instances_died_goes_on(scene: Scene) -> None:
    """Bystanders of a poison request lose nothing."""
    await scene.start("a", [PROGRESS_TOKENS, Act.DIE])
    await scene.start("b", [1, Act.DIE])
    await scene.start("c")
    assert (await scene.reply()).instances == ["a", "b", "c"]


async def test_an_instance_that_was_leaving_did_not_die_of_its_requests(scene: Scene) -> None:
    for name in "ab":
        worker = await scene.start(name, [1, Act.DIE])
        scene.hear(worker)
    await scene.start("c")
    leaving = asyncio.create_task(_drain_when_asked(scene, "a", "b"))
    assert (await scene.reply()).instances == ["a", "b", "c"]
    await leaving


async def _drain_when_asked(scene: Scene, *names: str) -> None:
    for name in names:
        while not scene.workers[name].asked:
            await asyncio.sleep(0)
        scene.hear(scene.workers[name], draining=True)


async def test_a_silent_instance_is_left_and_no_death(scene: Scene) -> None:
    for name in "abc":
        await scene.start(name, [1])
    await scene.start("d")
    seen = await scene.reply(silence_s=1.5)
    assert seen.instances == ["a", "b", "c", "d"]
    assert scene.ejected == {"a", "b"}, "one request ejects two at most"


async def test_nobody_there_costs_an_attempt_and_ejects_and_is_no_death(scene: Scene) -> None:
    for name in "abc":
        await (await scene.start(name)).server.stop(None)
    await scene.start("d")
    history = FailureHistory()
    assert (await scene.reply(history=history)).instances == ["d"]
    assert scene.ejected == {"a", "b", "c"}
    assert history.deaths == 0


async def test_an_instance_that_is_full_is_left_alone_for_as_long_as_it_says(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.router_service.routing.instance_pool.MAX_FULL_S", 3600.0)
    await scene.start("a", [Overloaded("full", 3600.0)])
    await scene.start("b")
    assert [(await scene.reply(f"r{i}")).instances for i in range(3)] == [["b"]] * 3
    assert scene.tried == {"a": 1, "b": 3}


async def test_being_full_costs_no_attempt_and_ejects_nobody(scene: Scene) -> None:
    scene.policy = scene.policy.model_copy(update={"max_attempts": 1})
    await scene.start("a", *[[Overloaded("full", 0.0)]] * 3)
    await scene.reply()
    assert scene.tried == {"a": 4}
    assert scene.ejected == set()


async def test_a_tier_that_stays_full_says_so_after_so_many_refusals(scene: Scene) -> None:
    await scene.start("a", *[[Overloaded("full", 0.01)]] * 99)
    with pytest.raises(Overloaded) as caught:
        await scene.reply()
    assert caught.value.retry_after_s == 0.01
    assert scene.tried == {"a": scene.policy.max_refusals}


async def test_a_draining_instance_is_left_and_costs_no_attempt(scene: Scene) -> None:
    scene.policy = scene.policy.model_copy(update={"max_attempts": 1})
    for name in "abc":
        await scene.start(name, [InstanceDraining("draining")])
    await scene.start("d")
    assert (await scene.reply()).instances == ["d"]
    assert scene.ejected == {"a", "b", "c"}


async def test_instances_tried_are_bounded(scene: Scene) -> None:
    await scene.start("a", *[[InternalError("bug")]] * 9)
    await scene.start("b", *[[InternalError("bug")]] * 9)
    with pytest.raises(Unavailable, match="tier only"):
        await scene.reply()
    assert sum(scene.tried.values()) == scene.policy.max_attempts
    assert scene.tried == {"a": 2, "b": 2}, "the one just left is avoided"
    assert scene.ejected == set(), "one request's internal errors eject nobody"


async def test_internal_errors_of_several_requests_in_a_row_eject(scene: Scene) -> None:
    worker = await scene.start("a", [InternalError("bug")], [1000, Act.FINISH])
    await scene.start("b")
    await scene.reply("r0")
    scene.pool.view_changed()
    await scene.reply("r1")  # a success at a between
    worker.scripts.extend([[InternalError("bug")]] * FAILURES_TO_EJECT)
    for i in range(FAILURES_TO_EJECT):
        assert scene.ejected == set()
        await scene.reply(f"s{i}")
    assert scene.ejected == {"a"}


async def test_where_tokens_are_missing_the_reply_goes_on_elsewhere_and_a_few_of_them_eject(scene: Scene) -> None:
    script: Script = [3, Act.SKIP_A_TOKEN]
    await scene.start("a", *[script] * FAILURES_TO_EJECT)
    await scene.start("b")
    for i in range(FAILURES_TO_EJECT):
        assert scene.ejected == set()
        assert (await scene.reply(f"r{i}")).instances == ["a", "b"]
    assert scene.ejected == {"a"}


async def test_a_reply_that_the_worker_aborts_goes_on_elsewhere_and_ejects_nobody(scene: Scene) -> None:
    await scene.start("a", [3, Act.ABORT])
    await scene.start("b")
    assert (await scene.reply()).instances == ["a", "b"]
    assert scene.ejected == set()


@pytest.mark.parametrize(
    "status",
    [
        errors.to_status(Unavailable("the call is broken")),
        errors.to_status(invalid("steps", "a step that breaks the protocol")),
        rpc_status.to_status(status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="message larger than max")),
    ],
    ids=lambda status: status.code.name,
)
async def test_a_break_of_the_shared_call_is_nobodys_death(scene: Scene, status: grpc.Status) -> None:
    """One reply's step breaks the call of nine, twice: the others complete, and the worker is not ejected."""
    scene.policy = scene.policy.model_copy(update={"max_attempts": 1})
    worker = await scene.start("a", *[[1]] * 8, [1, Act.BREAK_CALL], *[[1]] * 8, [Act.BREAK_CALL])
    worker.broken_by = status
    histories = [FailureHistory() for _ in range(9)]
    seen = await asyncio.gather(*(scene.reply(f"r{i}", history=history) for i, history in enumerate(histories)))
    assert len(seen) == 9
    assert [history.deaths for history in histories] == [0] * 9
    assert scene.ejected == set()


@pytest.mark.parametrize("error", [AlreadyRunning("r"), NotFound("transfer", "t")])
async def test_a_name_that_is_taken_or_unknown_there_is_tried_again_under_another(
    scene: Scene, error: PenstockError
) -> None:
    worker = await scene.start("a", [error])
    await scene.reply()
    first, second = (asked.request_id for asked in worker.asked)
    assert first != second
    assert scene.ejected == set()


async def test_a_duplicate_is_told_as_such_in_the_end(scene: Scene) -> None:
    await scene.start("a", *[[AlreadyRunning("r")]] * 9)
    with pytest.raises(AlreadyRunning):
        await scene.reply()
    assert scene.tried == {"a": scene.policy.max_attempts}


@pytest.mark.parametrize(
    "error",
    [
        invalid("prompt", "is wrong"),
        PromptTooLong.by("prompt", 9, 8),
        MessageTooLarge.by("prompt", 9, 8),
        RequestFailed("its row failed"),
        NotServed("no"),
        DeadlineExceeded("late"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_is_the_requests_own_ends_it_at_once_and_ejects_nobody(scene: Scene, error: PenstockError) -> None:
    await scene.start("a", [error])
    await scene.start("b")
    with pytest.raises(type(error)):
        await scene.reply()
    assert scene.tried == {"a": 1, "b": 0}
    assert scene.ejected == set()


async def test_a_tier_without_instances_is_given_up_at_once_or_waited_for(scene: Scene) -> None:
    """may_give_up: at once, however long `tier_wait_s`; otherwise an instance that comes meanwhile gets the request."""
    scene.policy = scene.policy.model_copy(update={"tier_wait_s": 600.0})
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(Unavailable, match="no instance"):
        await scene.reply(may_give_up=True)
    assert loop.time() - began < 60
    waiting = asyncio.create_task(scene.reply())
    await asyncio.sleep(0)
    await scene.start("late")
    assert (await waiting).instances == ["late"]
    scene.hear(scene.workers["late"], draining=True)
    scene.policy = scene.policy.model_copy(update={"tier_wait_s": 0.05})
    began = loop.time()
    with pytest.raises(Unavailable, match="no instance"):
        await scene.reply()
    assert loop.time() - began >= 0.05


async def test_a_tier_whose_worker_loads_is_waited_for_up_to_the_deadline(scene: Scene) -> None:
    """However short `tier_wait_s`, which begins when no worker loads any more."""
    scene.policy = scene.policy.model_copy(update={"tier_wait_s": 0.05})
    await scene.start("a", [3, Act.DIE])
    scene.hear(scene.workers["a"], instance_id="loading-b", model=None, tier="only")
    waiting = asyncio.create_task(scene.reply())
    while not scene.ejected:
        await asyncio.sleep(0)
    scene.view.forget("a")
    await scene.pool.change(0.2)  # four times as long
    assert not waiting.done()
    await scene.start("b")
    assert (await waiting).instances == ["a", "b"]
    scene.view.forget("b")
    with pytest.raises(DeadlineExceeded):
        await scene.reply("late", within_s=0.2)
    scene.view.forget("loading-b")
    with pytest.raises(Unavailable, match="no instance"):
        await scene.reply("never")


async def test_a_reply_that_has_begun_waits_for_an_instance_also_in_a_tier_that_may_be_given_up(scene: Scene) -> None:
    scene.policy = scene.policy.model_copy(update={"tier_wait_s": 600.0})
    await scene.start("a", [3, Act.DIE])
    waiting = asyncio.create_task(scene.reply(may_give_up=True))
    while not scene.ejected:
        await asyncio.sleep(0)
    await scene.start("b")
    assert (await waiting).instances == ["a", "b"]


async def test_a_full_tier_is_waited_for_however_short_the_patience(scene: Scene) -> None:
    """Every place is taken: that is no tier without instances."""
    worker = await scene.start("a")
    scene.hear(worker, load=replace(worker.record.load, running_tokens=(1,) * PLACES))  # type: ignore[type-var]
    waiting = asyncio.create_task(scene.reply(may_give_up=True))
    await scene.pool.change(0.05)
    assert not waiting.done()
    scene.hear(worker)
    assert (await waiting).instances == ["a"]


async def test_the_spans_of_a_reply_are_bounded(scene: Scene) -> None:
    """Attempts beyond the limit leave no span, and the reply completes."""
    attempts = MAX_TRACED_CALLS + 3
    scene.policy = scene.policy.model_copy(update={"max_attempts": attempts + 1})
    await scene.start("a", *[[AlreadyRunning("r")]] * attempts)
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = tracers.get_tracer("t")
    with tracer.start_as_current_span("tier") as span:
        seen = await scene.reply(generation=scene.tier(tracer=tracer), parent=telemetry.context_of(span))
    assert seen.done.reason is FinishReason.LENGTH
    assert scene.tried == {"a": attempts + 1}
    assert [span.name for span in exporter.get_finished_spans()].count(METHOD) == MAX_TRACED_CALLS


async def test_an_instance_is_sought_for_the_tokens_that_the_reply_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the prompt, as the tier has counted tokens per character so far, and those that are generated."""
    await scene.start("a", [5, Act.DIE])
    await scene.start("b")
    sought, place = list[int](), scene.pool.place

    def noting(tier: str, request_id: str, tokens: int, **more: Any) -> Any:
        sought.append(tokens)
        return place(tier, request_id, tokens, **more)

    monkeypatch.setattr(scene.pool, "place", noting)
    generation = scene.tier()
    await scene.reply("x" * 40, generation=generation)  # the prompt; it has 3 tokens
    await scene.reply("y" * 40, generation=generation)
    assert sought == [10, 3 + 5, 3]


async def test_an_error_of_the_request_itself_ends_it_even_after_its_last_token(scene: Scene) -> None:
    await scene.start("a", [TOKENS, RequestFailed("its text cannot be computed")])
    with pytest.raises(RequestFailed):
        await scene.reply()


async def test_the_client_is_told_why_the_last_instance_was_left_that_had_tokens(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that others were full meanwhile, unless it was full itself."""
    monkeypatch.setattr("penstock.router_service.routing.instance_pool.MAX_FULL_S", 3600.0)
    await scene.start("a", [5, Act.DIE])
    await scene.start("b", [Overloaded("no", 3600.0)])
    await scene.start("c", [1000, Act.FINISH], [5, Overloaded("no", 0.0)])
    seen = await scene.reply()
    assert seen.instances == ["a", "c"]
    assert seen.reasons not in (["full"], [""])
    seen = await scene.reply("again")
    assert (seen.instances[0], seen.reasons) == ("c", ["full"])


async def test_a_reply_that_has_ended_is_not_moved(scene: Scene) -> None:
    await scene.start("a", [5, Act.DIE])
    other, generation = await scene.start("b"), scene.tier()
    await scene.reply(generation=generation)
    with pytest.raises(NotFound, match="active reply"):
        await generation.move("r", other.record, "asked for")


async def test_an_instance_is_sent_the_tokens_that_it_must_compute(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its record tells of them, they are counted as its pending work: the prompt's and those generated elsewhere."""
    await scene.start("a", [5, Act.DIE])
    await scene.start("b")
    sent, sending = list[tuple[str, int]](), scene.pool.sending

    def noting(instance_id: str, tokens: int) -> Any:
        sent.append((instance_id, tokens))
        return sending(instance_id, tokens)

    monkeypatch.setattr(scene.pool, "sending", noting)
    await scene.reply("x" * 40)  # the prompt; it has 3 tokens
    assert sent == [("a", 10), ("b", 3 + 5)]


async def test_advice_to_move_is_followed_by_one_move_at_a_time_which_ends_with_the_reply(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = asyncio.Event()
    await scene.start("a", [3, Act.ADVISE_MOVE, Act.ADVISE_MOVE, proceed, 1000, Act.FINISH])
    followed, ended = list[int](), list[str]()

    async def follow(
        _: MoveAgent, tier: str, reply: object, request_id: str, advice: MoveAdvice, parent: Context
    ) -> None:
        followed.append(advice.tokens)
        proceed.set()
        try:
            await asyncio.Event().wait()  # no target answers
        finally:
            ended.append(tier)

    monkeypatch.setattr(MoveAgent, "follow", follow)
    assert (await scene.reply()).instances == ["a"]
    assert (followed, ended) == ([6], ["only"])


async def test_how_long_a_move_by_advice_has_stalled_its_reply_is_known_to_the_next_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = asyncio.Event()
    await scene.start("a", [3, Act.ADVISE_MOVE, proceed, 1000, Act.FINISH])

    async def follow(*_: object) -> ReplyMoved:
        proceed.set()
        return ReplyMoved(5, 7.0, 10)

    monkeypatch.setattr(MoveAgent, "follow", follow)
    generation = scene.tier()
    await scene.reply(generation=generation)
    assert generation._services.stalls.expected_s == 7.0


async def test_after_its_deadline_a_reply_is_sent_to_no_instance(scene: Scene) -> None:
    """Requests arrive in the order in which they are sent: a first one would have come before the second."""
    worker = await scene.start("a")
    with pytest.raises(DeadlineExceeded):
        await scene.reply("late", within_s=0.0)
    await scene.reply("second")
    assert [asked.request_id.partition(":")[0] for asked in worker.asked] == ["second"]


def test_the_expected_stall_of_a_move_is_that_of_the_worst_but_few() -> None:
    stalls = MoveStalls()
    stalls.add(NotMoved("no"))
    assert stalls.expected_s == FIRST_STALL_S
    for _ in range(19):
        stalls.add(ReplyMoved(5, 2.0, 10))
    stalls.add(ReplyMoved(5, 7.0, 10))
    assert 2.0 <= stalls.expected_s <= 7.0
    assert stalls.expected_s > FIRST_STALL_S
