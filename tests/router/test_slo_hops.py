"""What is left of a promise, which instances are tried for one tier's reply, and what follows a decline."""

import asyncio
import math
from dataclasses import dataclass, field

import pytest
from opentelemetry.context import Context

from penstock.router_service.domain.failures import FailureHistory
from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation.reply_assembler import TierEvent
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.router_service.generation.tier_times import MAX_AGE_S, TierTimes
from penstock.services.domain.errors import Overloaded
from penstock.services.domain.instances import SloHeadroom
from penstock.services.domain.slo.promises import MIN_REMAINDER_S, Promise
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.types.events import InstanceChanged, TierAdmitted, TierDeclined, TierStarted
from penstock.types.mesh_status import ReplyMoved
from penstock.types.plans import TierPlan
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloClass, SloFallback, SloPhase
from penstock.types.workers import EngineFinished
from tests.support.present import present
from tests.support.scripted_worker_servicer import Act, Script
from tests.support.tier_scene import TOKENS, Scene

DECLINES: Script = [Act.DECLINE]
LIMIT_S = 60.0
THREE_HOPS = MeshSlo(max_hops=3, hop_time_s=LIMIT_S)


@dataclass
class Outcome:
    """What a client sees of a reply, and how it ended."""

    events: list[TierEvent] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    done: EngineFinished | None = None

    def of(self, kind: type) -> list[str]:
        return [getattr(event, "instance_id", "") for event in self.events if isinstance(event, kind)]

    @property
    def classes(self) -> list[SloClass | None]:
        return [event.slo_class for event in self.events if isinstance(event, TierAdmitted)]


def promise_of(
    fallback: SloFallback = SloFallback.BEST_EFFORT, ttft_s: float | None = LIMIT_S, produced: int = 0
) -> ReplyPromise:
    slo = Slo(ttft_s, (SloPhase(0, 10.0),), fallback=fallback)
    return ReplyPromise(Promise.received(slo, asyncio.get_running_loop().time()), produced)


async def reply(
    scene: Scene,
    promise: ReplyPromise,
    hops: MeshSlo = THREE_HOPS,
    resumed: tuple[int, ...] = (),
    *,
    generation: TierGeneration | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """A whole reply. outcome: to be filled while it runs."""
    outcome = outcome or Outcome()
    outcome.token_ids += resumed
    scene.received["r"] = outcome.token_ids
    loop = asyncio.get_running_loop()

    def on_tokens(frame: object) -> None:
        outcome.token_ids += frame.token_ids  # type: ignore[attr-defined]
        promise.take(frame, loop.time())  # type: ignore[arg-type]

    outcome.done = await (generation or scene.tier(LIMIT_S, hops=hops)).generate(
        "only",
        GenerationRequest("r", TextPrompt("r"), SamplingParams(seed=1, max_tokens=TOKENS), resumed),
        loop.time() + LIMIT_S,
        Context(),
        on_event=outcome.events.append,
        on_tokens=on_tokens,
        may_give_up=False,
        history=FailureHistory(),
        promise=promise,
    )
    return outcome


def declines(scene: Scene) -> dict[str, list[bool]]:
    """By worker: whether each request asked to be declined rather than served as best effort."""
    return {name: [asked.decline_unkept_slo for asked in worker.asked] for name, worker in scene.workers.items()}


async def test_a_decline_is_an_answer_and_the_next_instance_is_tried(scene: Scene) -> None:
    """No instance is ejected, no attempt and no refusal is spent, and the client sees no failover."""
    scene.policy = type(scene.policy)(tier_wait_s=0.0, max_attempts=1, max_refusals=1, max_deaths=1)
    await scene.start("a", DECLINES)
    await scene.start("b", DECLINES)
    await scene.start("c")
    outcome = await reply(scene, promise_of())
    assert outcome.token_ids == list(range(TOKENS))
    assert outcome.of(TierDeclined) == ["a", "b"]
    assert outcome.of(TierStarted) == ["c"]
    assert not outcome.of(InstanceChanged)
    assert outcome.classes == [SloClass.STANDARD]
    assert scene.ejected == set()
    assert declines(scene) == {"a": [True], "b": [True], "c": [False]}, "the last one serves in any case"


async def test_behind_the_last_hop_it_is_served_as_best_effort(scene: Scene) -> None:
    await scene.start("a", DECLINES)
    last = await scene.start("b")
    last.keeps_slos = False
    outcome = await reply(scene, promise_of())
    assert outcome.classes == [SloClass.BEST_EFFORT]
    assert outcome.token_ids == list(range(TOKENS))
    assert declines(scene) == {"a": [True], "b": [False]}


@pytest.mark.parametrize(
    ("limits", "tried"),
    [
        (MeshSlo(max_hops=0, hop_time_s=LIMIT_S), 1),
        (MeshSlo(max_hops=1, hop_time_s=LIMIT_S), 2),
        (MeshSlo(max_hops=9, hop_time_s=LIMIT_S), 4),
        (MeshSlo(max_hops=9, hop_time_s=0.0), 1),
    ],
    ids=["none", "one", "all", "no time"],
)
async def test_hops_and_their_time_are_bounded(scene: Scene, limits: MeshSlo, tried: int) -> None:
    for name in "abcd":
        await scene.start(name, DECLINES)
    outcome = await reply(scene, promise_of(SloFallback.DECLINE), limits)
    assert present(outcome.done).reason is FinishReason.DECLINED
    assert (outcome.token_ids, outcome.of(TierStarted)) == ([], [])
    assert sorted(scene.tried.values()) == [0] * (4 - tried) + [1] * tried


async def test_who_waits_for_a_place_until_the_first_token_is_due_is_declined(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.router_service.routing.instance_pool.MAX_FULL_S", 3600.0)
    await scene.start("a", [Overloaded("full", 3600.0)])
    outcome = await reply(scene, promise_of(SloFallback.DECLINE, ttft_s=0.05))
    assert present(outcome.done).reason is FinishReason.DECLINED
    assert scene.tried == {"a": 1}


async def test_who_may_be_served_late_waits_on_for_a_place(scene: Scene) -> None:
    await scene.start("a", [Overloaded("full", 0.2)])
    outcome = await reply(scene, promise_of(SloFallback.BEST_EFFORT, ttft_s=0.05))
    assert outcome.token_ids == list(range(TOKENS))


async def test_only_the_remainder_of_the_budget_travels(scene: Scene) -> None:
    """The second hop gets less time than the first; a reply that fails over gets what its pace leaves."""
    await scene.start("a", DECLINES)
    await scene.start("b", [3, Act.DIE])
    await scene.start("c")
    outcome = await reply(scene, promise_of(ttft_s=50.0))
    first, second, third = (
        scene.workers[name].asked[0].slo.time_to_first_token.ToNanoseconds() / 1e9 for name in "abc"
    )
    assert 50.0 > first > second > 0
    assert third <= 30.0, "behind three tokens: the pace of the windows, not the first token's time"
    assert outcome.token_ids == list(range(TOKENS))
    assert outcome.of(TierAdmitted) == ["b", "c"], "the class is announced again"
    assert scene.workers["c"].asked[0].slo.phases[0].time_per_output_token.seconds == 10


async def test_a_reply_that_has_begun_is_never_declined(scene: Scene) -> None:
    await scene.start("a", [3, Act.DIE])
    last = await scene.start("b")
    last.keeps_slos = False
    outcome = await reply(scene, promise_of(SloFallback.DECLINE))
    assert outcome.token_ids == list(range(TOKENS))
    assert outcome.classes == [SloClass.STANDARD, SloClass.BEST_EFFORT]
    assert declines(scene)["b"] == [False]


async def test_a_resumed_reply_is_never_declined(scene: Scene) -> None:
    await scene.start("a")
    outcome = await reply(scene, promise_of(SloFallback.DECLINE, produced=3), resumed=(0, 1, 2))
    assert outcome.token_ids == list(range(TOKENS))
    assert declines(scene) == {"a": [False]}


async def test_a_worker_that_declines_unasked_has_failed(scene: Scene) -> None:
    await scene.start("a", DECLINES)
    await scene.start("b")
    outcome = await reply(scene, promise_of(), MeshSlo(max_hops=0, hop_time_s=LIMIT_S))
    assert outcome.token_ids == list(range(TOKENS))
    assert declines(scene) == {"a": [False], "b": [False]}


async def test_the_instance_with_headroom_is_tried_first(scene: Scene) -> None:
    """The least loaded one cannot keep it, by its own record: a busier one with headroom gets the request."""
    for name, headroom in (
        ("idle", None),
        ("behind", SloHeadroom(1000.0, 1e5, 10_000)),
        ("full", SloHeadroom(0.0, 1e5, 0)),
        ("able", SloHeadroom(0.1, 1e5, 10_000)),
    ):
        worker = await scene.start(name)
        worker.headroom = headroom
        scene.hear(worker)
    outcome = await reply(scene, promise_of())
    assert outcome.of(TierStarted) == ["able"]


@pytest.mark.parametrize("kept", [True, False])
async def test_the_target_of_a_move_shall_decline_only_what_was_promised(scene: Scene, kept: bool) -> None:
    """A promise must not end by a move; what is served as best effort anyway may move to anyone. What is left travels."""
    source = await scene.start("a", [20, Act.HAND_OVER])
    source.keeps_slos = kept
    target = await scene.start("b")
    target.transferred.set_result(20)
    generation, outcome = scene.tier(LIMIT_S, hops=THREE_HOPS), Outcome()
    reading = asyncio.create_task(reply(scene, promise_of(), generation=generation, outcome=outcome))
    while len(outcome.token_ids) < 20:
        await asyncio.sleep(0)
    assert isinstance(await generation.move("r", target.record, "asked for"), ReplyMoved)
    await reading
    (request,) = target.asked
    assert request.HasField("slo")
    assert request.decline_unkept_slo is kept
    left_s = request.slo.time_to_first_token.ToNanoseconds() / 1e9
    assert left_s > LIMIT_S, "behind the first token: what its window leaves, not what was left at first"
    assert outcome.token_ids == list(range(TOKENS))


ROUTE = (TierPlan("small", "s", 50.0, 1), TierPlan("large", "l", None, 1))


def frame(offset: int, count: int = 1, text: str = "") -> TokenFrame:
    return TokenFrame(offset, tuple(range(count)), text)


def test_the_deadline_is_absolute_and_the_remainder_shrinks() -> None:
    promise = ReplyPromise(Promise.received(Slo(2.0, (SloPhase(0, 0.1),)), 100.0))
    assert promise.remainder(100.5) == Slo(1.5, (SloPhase(0, 0.1),))
    first_hop = present(promise.remainder(100.5))
    second = ReplyPromise(Promise.received(first_hop, 7.0))  # another process, another clock
    assert second.remainder(7.25) == Slo(1.25, (SloPhase(0, 0.1),))
    assert promise.remainder(101.5) == Slo(0.5, (SloPhase(0, 0.1),))
    assert promise.remainder(200.0) == Slo(MIN_REMAINDER_S, (SloPhase(0, 0.1),)), "never zero, which means no deadline"


def test_behind_the_first_token_what_is_left_is_the_pace_of_its_windows() -> None:
    promise = ReplyPromise(Promise.received(Slo(2.0, (SloPhase(0, 0.1),)), 0.0))
    promise.take(frame(0), 1.0)
    assert promise.next_token_due_s() == 1.1
    for i in range(1, 11):
        promise.take(frame(i), 1.0 + 0.01 * i)  # ten times as fast: most of a window is left
    assert math.isclose(promise.next_token_due_s(), 1.01 + 1.0)
    assert promise.attainment.late_windows == 0
    promise.take(frame(11), 5.0)
    late = promise.attainment
    assert (late.attained, late.late_windows) == (False, 1)


def test_phases_behind_a_marker_and_those_that_have_passed_travel_as_what_they_are() -> None:
    phases = (SloPhase(0, 0.5), SloPhase(0, 0.1, "</think>"), SloPhase(100, 0.2))
    promise = ReplyPromise(Promise(None, phases))
    promise.take(frame(0, 5, "some thoughts"), 1.0)
    remainder = present(promise.remainder(1.0))
    assert remainder.phases == phases
    promise.take(frame(5, 2, " </think> so"), 1.2)
    remainder = present(promise.remainder(1.2))
    assert remainder.phases == (SloPhase(0, 0.1), SloPhase(100, 0.2))
    assert not [*remainder.problems("slo")], "a worker accepts it"


def test_a_promise_stays_made_whatever_becomes_of_its_class() -> None:
    promise = ReplyPromise(Promise(1.0, (SloPhase(0, 0.1),)))
    slo = promise.remainder(0.0)
    assert promise.granted(slo, slo_kept=True) is SloClass.STANDARD
    assert promise.granted(slo, slo_kept=False) is SloClass.BEST_EFFORT
    assert promise.promised
    first_only = ReplyPromise(Promise(1.0))
    first_only.granted(first_only.remainder(0.0), slo_kept=True)
    first_only.take(frame(0), 0.5)
    assert first_only.remainder(0.6) is None, "all has been kept"
    assert first_only.granted(None, slo_kept=False) is SloClass.STANDARD


def test_a_move_needs_slack_for_its_stall() -> None:
    promise = ReplyPromise(Promise(10.0, (SloPhase(0, 0.1),)))
    assert promise.allows_stall(99.0, 0.0), "nothing is promised yet"
    promise.granted(promise.remainder(0.0), slo_kept=True)
    promise.take(frame(0), 1.0)
    assert promise.allows_stall(0.05, 1.0)
    assert not promise.allows_stall(0.2, 1.0)
    promise.granted(promise.remainder(1.0), slo_kept=False)
    assert promise.allows_stall(99.0, 1.0), "a best-effort reply has nothing to lose"


def measured(times: TierTimes, count: int, now_s: float) -> None:
    """Answers of both tiers and judgements that end now: 2 s on small, 0.5 s to large's first token, 0.3 s for the judge."""
    for _ in range(count):
        times.answered("small", now_s - 2.0, now_s - 1.5, now_s)
        times.answered("large", now_s - 3.0, now_s - 2.5, now_s)
        times.judged(now_s - 0.3, now_s)


def test_a_held_answer_has_a_time_to_finish_by() -> None:
    """The first token's time less the judge and a reserve for the last tier; its own first token still earlier."""
    times = TierTimes()
    assert times.finish_by_s(110.0, ROUTE, 100.0) == 110.0
    assert not times.is_too_late("small", 100.0, 100.0), "nothing is skipped on no measurement"
    measured(times, 20, 100.0)
    finish_by_s = times.finish_by_s(110.0, ROUTE, 100.0)
    assert math.isclose(finish_by_s, 110.0 - 0.3 - 0.5)
    assert math.isclose(times.first_token_due_s("small", finish_by_s, 100.0), finish_by_s - 1.5)
    assert not times.is_too_late("small", 102.1, 100.0)
    assert times.is_too_late("small", 101.9, 100.0)


def test_a_tier_that_was_skipped_is_tried_again_after_a_while() -> None:
    times = TierTimes()
    measured(times, 20, 100.0)
    assert times.is_too_late("small", 100.0 + MAX_AGE_S, 99.0 + MAX_AGE_S)
    assert not times.is_too_late("small", 101.0 + MAX_AGE_S, 100.5 + MAX_AGE_S)
