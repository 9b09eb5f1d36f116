"""One tier's reply over instances that fail: the table of failures is carried out. Real calls, scripted workers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.router_service.domain.failures import FAILURES_TO_EJECT, FailureHistory
from penstock.router_service.generation.attempt import FIRST_STALL_S, METHOD, MoveStalls
from penstock.router_service.generation.tier_generation import MAX_TRACED_CALLS
from penstock.router_service.migration.bidding import MoveAgent
from penstock.services import errors, telemetry
from penstock.services.background import end
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
from penstock.types.events import InstanceChanged
from penstock.types.mesh_status import ReplyMoved
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import PROGRESS_TOKENS, GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished, MoveAdvice, NotMoved
from tests.support.scripted_worker_servicer import PLACES, Act, Script
from tests.support.tier_scene import TOKENS, Scene
from tests.support.token_events import called

FULL, BUG, AWAY = Overloaded("full", 0.01), InternalError("bug"), InstanceDraining("draining")
DIE: Script = [Act.DIE]


class Case(NamedTuple):
    """A reply of one request. scripts: of a, b, c, ... in turn, each with those of its calls; an instance without one serves.

    tried: how often each was. ejected: by name. end: the instances of a complete reply, or the error.
    """

    scripts: Sequence[Sequence[Script]]
    end: str | type[PenstockError]
    ejected: str
    tried: Sequence[int]
    policy: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "a death": Case([[[5, Act.DIE]], []], "ab", "a", [1, 1]),
    "a death after the last token": Case([[[TOKENS, Act.DIE]], []], "a", "a", [1, 0]),
    "two die of a request": Case([[DIE], [DIE], [DIE]], PoisonRequest, "ab", [1, 1, 0]),
    "three may die of it, of which two are ejected": Case(
        [[DIE]] * 4, PoisonRequest, "ab", [1, 1, 1, 0], {"max_deaths": 3}
    ),
    "one that ran well did not die of it": Case(
        [[[PROGRESS_TOKENS, Act.DIE]], [[1, Act.DIE]], []], "abc", "ab", [1, 1, 1]
    ),
    "silence is no death, and ejects two at most": Case([[[1]], [[1]], [[1]], []], "abcd", "ab", [1, 1, 1, 1]),
    "being full costs no attempt": Case([[[FULL]] * 3], "a", "", [4], {"max_attempts": 1}),
    "a tier that stays full": Case([[[FULL]] * 99], Overloaded, "", [4]),
    "draining costs no attempt": Case([[[AWAY]]] * 3 + [[]], "d", "abc", [1, 1, 1, 1], {"max_attempts": 1}),
    "attempts are bounded, and the instance just left is avoided": Case(
        [[[BUG]] * 9, [[BUG]] * 9], Unavailable, "", [2, 2]
    ),
    "the worker aborts": Case([[[3, Act.ABORT]], []], "ab", "", [1, 1]),
    "a duplicate is told as such in the end": Case([[[AlreadyRunning("r")]] * 9], AlreadyRunning, "", [4]),
    "an error of the request after its last token": Case(
        [[[TOKENS, RequestFailed("its text cannot be computed")]], []], RequestFailed, "", [1, 0]
    ),
} | {
    f"the request's own: {type(error).__name__}": Case([[[error]], []], type(error), "", [1, 0])
    for error in (
        invalid("prompt", "is wrong"),
        PromptTooLong.by("prompt", 9, 8),
        MessageTooLarge.by("prompt", 9, 8),
        RequestFailed("its row failed"),
        NotServed("no"),
        DeadlineExceeded("late"),
    )
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_each_failure_costs_and_ejects_what_the_table_says(case: Case, scene: Scene) -> None:
    """And the reply goes on at the next token, or ends with the error."""
    scene.policy = scene.policy.model_copy(update=dict(case.policy))
    names = [chr(ord("a") + i) for i in range(len(case.scripts))]
    for name, scripts in zip(names, case.scripts, strict=True):
        await scene.start(name, *scripts)
    silence_s = 1.5 if case is CASES["silence is no death, and ejects two at most"] else 30.0
    if isinstance(case.end, str):
        seen = await scene.reply(silence_s=silence_s)
        assert (seen.instances, seen.done.reason) == (list(case.end), FinishReason.LENGTH)
        assert seen.done.usage.output_tokens == TOKENS
    else:
        with pytest.raises(case.end) as caught:
            await scene.reply()
        if isinstance(caught.value, Overloaded):
            assert caught.value.retry_after_s == FULL.retry_after_s
    assert (scene.ejected, scene.tried) == (set(case.ejected), dict(zip(names, case.tried, strict=True)))


async def test_after_a_move_it_is_the_target_that_is_ejected(scene: Scene) -> None:
    """The reply began at a and moved to b, which dies: a is fit to take it back."""
    source = await scene.start("a", [20, Act.HAND_OVER])
    target = await scene.start("b", [5])
    tier = scene.tier()
    request = GenerationRequest("r", TextPrompt("hello"), SamplingParams(seed=1, max_tokens=TOKENS))
    deadline_s = asyncio.get_running_loop().time() + 300
    token_ids, instances, moving, history = list[int](), list[str](), None, FailureHistory()

    async def generated(call: Callable[[Any], None]) -> EngineFinished:
        return await tier.generate(
            "only",
            request,
            deadline_s,
            Context(),
            on_event=call,
            on_tokens=call,
            may_give_up=False,
            history=history,
            promise=None,
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


async def test_nobody_there_costs_an_attempt_and_ejects_and_is_no_death(scene: Scene) -> None:
    for name in "abc":
        await (await scene.start(name)).server.stop(None)
    await scene.start("d")
    history = FailureHistory()
    assert (await scene.reply(history=history)).instances == ["d"]
    assert scene.ejected == {"a", "b", "c"}
    assert history.deaths == 0


@pytest.mark.parametrize("first", [Overloaded("full", 3600.0), Act.BREAK_CALL])
async def test_an_instance_that_is_full_or_whose_call_has_broken_is_left_alone_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, first: Overloaded | Act
) -> None:
    monkeypatch.setattr("penstock.router_service.routing.instance_pool.MAX_FULL_S", 3600.0)
    monkeypatch.setattr("penstock.router_service.generation.tier_generation.MIN_FULL_S", 3600.0)
    await scene.start("a", [first])
    await scene.start("b")
    assert [(await scene.reply(f"r{i}")).instances for i in range(3)] == [["b"]] * 3
    assert scene.tried == {"a": 1, "b": 3}


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
    """Those of the prompt, as the tier has counted tokens per character so far, and those that are generated. As many are
    counted as its pending work until its record tells of them."""
    await scene.start("a", [5, Act.DIE])
    await scene.start("b")
    sought, place = list[int](), scene.pool.place
    sent, sending = list[tuple[str, int]](), scene.pool.sending

    def noting(tier: str, request_id: str, tokens: int, **more: Any) -> Any:
        sought.append(tokens)
        return place(tier, request_id, tokens, **more)

    def noting_sent(instance_id: str, tokens: int) -> Any:
        sent.append((instance_id, tokens))
        return sending(instance_id, tokens)

    monkeypatch.setattr(scene.pool, "place", noting)
    monkeypatch.setattr(scene.pool, "sending", noting_sent)
    generation = scene.tier()
    await scene.reply("x" * 40, generation=generation)  # the prompt; it has 3 tokens
    await scene.reply("y" * 40, generation=generation)
    assert sought == [10, 3 + 5, 3]
    assert sent == [("a", 10), ("b", 3 + 5), ("b", 3)]


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
