"""SLOs in a worker's engine: who is told that its SLO is kept, and that it is; drafts take no time from promises."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.latency_fit import fit_latency
from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.services.domain.slo.compiled import admission, certified_step, table
from penstock.services.domain.slo.compiled.layout import KEPT_SHARE
from penstock.services.domain.slo.draft_windows import DraftPace, longest_windows, tightened_pace
from penstock.services.domain.slo.reply_length import MIN_REPLIES, ReplyLengths
from penstock.services.domain.slo.speculation import SpeculationTier, plan_of, speculation_lengths
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloPhase
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.compose import build_engine
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.profile import measured_latency
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_core
from penstock.worker_service.scheduling.policies import PolicyName, batch_policy
from penstock.worker_service.scheduling.slo_policy import SloPolicy
from penstock.worker_service.telemetry.load_tracker import LoadTracker
from tests.support.draft_sources import KnownReply
from tests.support.engines import started
from tests.support.present import present
from tests.support.virtual_clock import VirtualClock

LATENCY = StepLatencyModel.linear(0.01, 1e-4, 1e-7)


def options(policy: PolicyName = PolicyName.SLO, **changes: int) -> SimulatedEngineOptions:
    return SimulatedEngineOptions("m", LATENCY, batch_policy=policy, best_effort_reserve=0.05, **changes)


def request(
    name: str, prompt: int, output: int, slo: Slo | None, resumed: tuple[int, ...] = ()
) -> tuple[GenerationRequest, list[int]]:
    tokens = [ord(name[0]) % 26 + 97 + i % 7 for i in range(prompt)]
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return GenerationRequest(name, TokenPrompt(tuple(tokens)), sampling, resumed, slo), tokens


def pace(ttft_s: float | None, tpot_s: float) -> Slo:
    return Slo(ttft_s, (SloPhase(0, tpot_s),))


def run(
    core: EngineCore, clock: VirtualClock, pending: list[tuple[float, GenerationRequest, list[int]]]
) -> dict[str, list[tuple[float, object]]]:
    """Step a core through arrivals in virtual time: every event of every request, with its time."""
    events: dict[str, list[tuple[float, object]]] = {}
    while pending or not core.idle:
        if core.idle and pending[0][0] > clock.now():
            clock.sleep(pending[0][0] - clock.now())
        while pending and pending[0][0] <= clock.now():
            _, asked, prompt = pending.pop(0)
            admitted, _ = core.add(asked, prompt)
            events[asked.request_id] = [(clock.now(), admitted)] if admitted is not None else []
        for name, event in core.step():
            events[name].append((clock.now(), event))
    return events


def test_promised_requests_meet_their_slo_in_a_burst_and_the_rest_is_told_it_is_best_effort() -> None:
    slo = pace(0.4, 0.05)
    arrivals = [(0.02 * (i // 10), *request(f"r{i:02}", 300, 20, slo)) for i in range(40)]
    plain = served(arrivals, None, max_running=64)
    assert {len(reply) for reply in plain.replies.values()} == {20}
    promised, kept = plain.kept(arrivals)
    assert 5 <= promised == kept < 40


def test_without_an_slo_or_with_another_policy_a_request_is_best_effort_at_once() -> None:
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    for slo in (None, Slo()):
        admitted, _ = core.add(*request("a" if slo is None else "b", 10, 2, slo))
        assert isinstance(admitted, Admitted)
        assert not admitted.slo_kept
    core, _ = simulated_core(options(PolicyName.DECODE_FIRST), clock)
    admitted, _ = core.add(*request("a", 10, 2, pace(5.0, 1.0)))
    assert isinstance(admitted, Admitted)
    assert not admitted.slo_kept


def test_a_request_that_leaves_before_it_is_decided_on_is_forgotten() -> None:
    core, _ = simulated_core(options(), VirtualClock())
    core.add(*request("a", 10, 2, pace(5.0, 1.0)))
    finished = present(core.abort("a"))
    assert finished.reason is FinishReason.ABORTED
    assert core.step() == []
    assert core.idle


def test_a_resumed_reply_asks_for_what_is_left_of_its_promise() -> None:
    """Behind a failover the "first token" is the next one: due within the remainder, or the class is said to be another."""
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    for name, left_s, best_effort in (("a", 0.2, False), ("b", 0.001, True)):
        core.add(*request(name, 50, 30, pace(left_s, 0.05), resumed=(97, 98, 99)))
        _, admitted = core.step()[0]
        assert isinstance(admitted, Admitted)
        assert admitted.slo_kept is not best_effort


def test_the_mesh_file_names_the_policy_of_a_tier(tmp_path: Path) -> None:
    assert MeshTier(name="t", engine="simulated").batch_policy == "decode_first"
    with pytest.raises(ValueError, match="batch_policy"):
        MeshTier.model_validate({"name": "t", "batch_policy": "fastest"})
    with pytest.raises(ValueError, match="best_effort_reserve"):
        MeshTier.model_validate({"name": "t", "best_effort_reserve": 1.0})
    tier = MeshTier(name="t", engine="sglang", model=str(tmp_path), batch_policy="prefill_first")
    with pytest.raises(SettingsError, match="batch_policy"):
        build_engine(MeshFile(tiers=(tier,)), tier, ServiceSettings())


def test_warming_compiles_all_that_serving_calls() -> None:
    """No request waits for a compiler: what a worker has warmed before it is ready is all that it ever calls."""
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    compiled: tuple[Any, ...] = (
        admission.decide,
        certified_step.certified_step,
        certified_step.may_end_s,
        table._commit,
    )
    before = [len(function.signatures) for function in compiled]
    arrivals = [(0.05 * i, *request(f"r{i}", 50, 10, pace(1.0, 0.1) if i % 3 else None)) for i in range(12)]
    run(core, clock, arrivals)
    assert [len(function.signatures) for function in compiled] == before


def test_an_engine_s_steps_are_fitted_to_their_times() -> None:
    """The model that promises rest on is the engine's own, from a few seconds of its steps."""
    constant, _ = fit_latency([(StepLoad(n, 0), 0.01) for n in range(1, 30)])
    assert constant.step_s(StepLoad(5, 100)) == pytest.approx(0.01)

    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    measured, _ = measured_latency(core, seconds=60.0, now=clock.now)
    assert core.idle
    for load in (StepLoad(8, 800), StepLoad(256, 256)):
        assert measured.step_s(load) == pytest.approx(LATENCY.step_s(load), rel=0.02)


def test_of_a_slow_model_the_bend_of_its_steps_is_measured() -> None:
    """As of 1.5B in 4 bits on a CPU, where ten rows cost eight times one and sixty only three times ten."""
    slow = StepLatencyModel((1.0, 8.0, 16.0, 32.0, 64.0), (0.13, 0.85, 1.5, 2.0, 2.9))
    clock = VirtualClock()
    core, _ = simulated_core(replace(options(), latency=slow), clock)
    measured, _ = measured_latency(core, now=clock.now)
    assert clock.now() < 18.0
    for tokens in (1, 4, 8, 16, 32):
        assert measured.base_s(tokens) == pytest.approx(slow.base_s(tokens), rel=0.1)
    assert measured.base_s(64) == pytest.approx(slow.base_s(64), rel=0.3)


def test_the_first_promise_rests_on_the_slow_steps_of_the_measurement() -> None:
    steps = [
        (StepLoad(n, 16 * n), LATENCY.step_s(StepLoad(n, 16 * n)) * (1.2 if n % 4 == 0 else 1.0)) for n in range(1, 41)
    ]
    policy = batch_policy(PolicyName.SLO, LATENCY, 0.0, steps)
    assert policy.latency_correction == pytest.approx(1.2)


def test_the_reply_is_reserved_by_a_quantile_of_the_latest() -> None:
    lengths = ReplyLengths(0.9)
    assert lengths.predict(0, 500) == 500  # nothing is known yet
    for tokens in range(1, 101):
        lengths.add(tokens)
    assert lengths.predict(0, 500) == 91
    assert lengths.predict(0, 40) == 40
    assert lengths.predict(50, 500) == 96  # of those that are longer than it is already
    assert lengths.predict(100 - MIN_REPLIES + 1, 500) == 500


def test_after_a_restart_of_the_measurement_nothing_is_known_of_replies() -> None:
    """Those of the calibration say nothing about a user's."""
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    run(core, clock, [(0.0, *request(f"{i:02}", 10, 3, None)) for i in range(2 * MIN_REPLIES)])
    reserved = []
    for name in ("before", "after"):
        core.add(*request(name, 10, 500, pace(2.0, 0.05)))
        reserved.append(present(core.scheduler.waiting[-1].slo).output_tokens)
        core.abort(name)
        core.restart_throughput()
    assert reserved[0] < reserved[1]


async def test_the_correction_is_published_where_steps_are_predicted() -> None:
    """A gauge per tier that keeps SLOs; none where nothing is predicted."""
    for policy, expected in (("slo", 1.0), ("decode_first", None)):
        tier = MeshTier.model_validate({"name": "t", "engine": "simulated", "batch_policy": policy})
        engine = build_engine(MeshFile(tiers=(tier,)), tier, ServiceSettings())
        async with started(engine):
            reader = InMemoryMetricReader()
            LoadTracker(engine, MeterProvider([reader]).get_meter("test"), "t")
            data = present(reader.get_metrics_data())
            gauges = {
                metric.name: [point.value for point in metric.data.data_points]  # type: ignore[union-attr]
                for resource in data.resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
            }
        assert gauges.get("penstock.worker.step_correction") == (None if expected is None else [expected])


PACE = DraftPace(0.8, 1e-4)


def windows(paces: list[float], latency: StepLatencyModel, *, prompts_wait: bool) -> list[int]:
    return longest_windows(
        paces,
        PACE,
        latency,
        context_tokens=0,
        max_step_tokens=4096,
        max_window=7,
        prompts_wait=prompts_wait,
    )


def test_windows_are_the_solvers_lengths_while_prompts_wait() -> None:
    """By pace; each the best of all combinations, as `plan_of` prices them. Without prompts nothing is taken from any."""
    latency = StepLatencyModel.linear(0.015, 1e-4, 0.0)
    decodes = [tightened_pace(0.02, -1.0)] * 10 + [tightened_pace(0.1, -1.0)] * 20
    found = windows(decodes, latency, prompts_wait=True)
    tiers = [SpeculationTier(10, 0.02, 0.8), SpeculationTier(20, 0.1, 0.8)]
    with_drafts = StepLatencyModel(latency.knot_tokens, latency.knot_s, draft_step_s=PACE.step_s)
    plans = {
        lengths: plan
        for lengths in ((a, b) for a in range(1, 9) for b in range(1, 9))
        if (plan := plan_of(lengths, tiers, with_drafts, 0, 4096)) is not None
    }
    best = max(plans, key=lambda lengths: plans[lengths].prefill_tokens_per_s)
    assert found == [best[0] - 1] * 10 + [best[1] - 1] * 20
    assert found[0] > found[-1]
    assert windows(decodes, latency, prompts_wait=False) == [7] * 30


def test_a_request_behind_its_deadline_has_a_tightened_pace_and_may_draft_further() -> None:
    assert tightened_pace(0.05, -0.3) == 0.05
    assert tightened_pace(0.05, 0.1) == pytest.approx(0.04)
    assert tightened_pace(0.05, 9.0) == 0.025
    latency = StepLatencyModel.linear(0.015, 1e-4, 0.0)
    behind, ahead = windows([tightened_pace(0.03, 0.2), tightened_pace(0.03, -0.02)], latency, prompts_wait=True)
    assert behind > ahead
    assert speculation_lengths([SpeculationTier(1, 0.03, 0.8)], latency, max_step_tokens=4096) is not None


def test_where_no_length_keeps_the_pace_prompts_get_what_is_left() -> None:
    latency = StepLatencyModel.linear(1.0, 0.0, 0.0)
    assert windows([tightened_pace(0.05, 0.0)], latency, prompts_wait=True) == [0]


def served(
    arrivals: list[tuple[float, GenerationRequest, list[int]]], wrong_share: float | None, **changes: int
) -> "Run":
    """In virtual time. wrong_share: of the drafted tokens; None without drafts."""
    clock = VirtualClock()
    core, _ = simulated_core(options(PolicyName.SLO, **changes), clock)
    known = replies(arrivals)
    if wrong_share is not None:
        for i, (_, asked, prompt) in enumerate(arrivals):
            source = KnownReply(len(prompt), known[asked.request_id], wrong_share, most=7, seed=i)
            core.proposals.attach(asked.request_id, source)
    return Run(core, run(core, clock, list(arrivals)), clock.now())


def replies(arrivals: list[tuple[float, GenerationRequest, list[int]]]) -> dict[str, list[int]]:
    """Of each request by itself."""
    clock, result = VirtualClock(), dict[str, list[int]]()
    core, _ = simulated_core(options(max_running=64), clock)
    for _, asked, prompt in arrivals:
        plain = GenerationRequest(asked.request_id, asked.prompt, asked.sampling)
        events = run(core, clock, [(clock.now(), plain, prompt)])[asked.request_id]
        result[asked.request_id] = [t for _, e in events if isinstance(e, TokenFrame) for t in e.token_ids]
    return result


class Run:
    """What came of a run. broken: promises that were not kept."""

    def __init__(self, core: EngineCore, events: dict[str, list[tuple[float, object]]], ends_s: float) -> None:
        self.core, self.events, self.ends_s = core, events, ends_s
        self.replies = {
            name: [t for _, e in own if isinstance(e, TokenFrame) for t in e.token_ids] for name, own in events.items()
        }

    def kept(self, arrivals: list[tuple[float, GenerationRequest, list[int]]]) -> tuple[int, int]:
        """(promises, those that were kept)."""
        promised = kept = 0
        for arrival_s, asked, _ in arrivals:
            own = self.events[asked.request_id]
            admitted = next(e for _, e in own if isinstance(e, Admitted))
            assert isinstance(own[-1][1], EngineFinished)
            if not admitted.slo_kept or asked.slo is None:
                continue
            promised += 1
            ttft_s = asked.slo.time_to_first_token_s
            # Received when the step under way had ended.
            tracker = AttainmentTracker(None if ttft_s is None else arrival_s + ttft_s + 0.05)
            for at_s, event in own:
                for _ in event.token_ids if isinstance(event, TokenFrame) else ():
                    tracker.token(at_s, asked.slo.phases[0].time_per_output_token_s)
            kept += tracker.result().attained
        return promised, kept


@pytest.mark.parametrize("wrong_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_every_promise_is_kept_with_drafts_right_or_wrong(wrong_share: float, seed: int) -> None:
    """Random arrivals of two paces and of best effort: the same replies, and no promise broken."""
    rng = random.Random(seed)
    paces = [pace(0.5, 0.05), pace(1.0, 0.03), None]
    arrivals = [
        (0.05 * i, *request(f"{chr(97 + i % 26)}{i:02}", rng.randint(20, 400), rng.randint(5, 60), rng.choice(paces)))
        for i in range(36)
    ]
    drafted = served(arrivals, wrong_share, max_running=64)
    assert drafted.replies == replies(arrivals)
    promised, kept = drafted.kept(arrivals)
    assert promised > 8
    assert kept == promised
    counts = drafted.core.proposals.of_sources
    assert counts.verified > 0
    assert (counts.accepted > 0.9 * counts.verified) == (wrong_share == 0.0)


def test_replies_are_the_same_where_right_drafts_may_not_come_in_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, dropped, came = itertools.cycle([True, False, False]), list[int](), list[tuple[float, bool]]()

    def may_end_s(_: SloPolicy, scheduler: object, at_s: float, accepted: Mapping[str, int]) -> tuple[float, bool]:
        come = next(answers)
        dropped.append(0 if come else sum(accepted.values()))
        came.append((at_s, come))
        return at_s, come

    monkeypatch.setattr(SloPolicy, "may_end_s", may_end_s)
    arrivals = [(0.05 * i, *request(f"{i:02}", 30, 60, pace(2.0, 0.05))) for i in range(9)]
    drafted = served(arrivals, 0.2)
    assert drafted.replies == replies(arrivals)
    frames = [
        (at_s, len(e.token_ids)) for own in drafted.events.values() for at_s, e in own if isinstance(e, TokenFrame)
    ]
    most_at_once = {let: max(n for at_s, n in frames if (at_s, let) in came) for let in (True, False)}
    assert sum(dropped) > 100
    assert most_at_once[True] > 1 == most_at_once[False]
    assert drafted.core.proposals.of_sources.accepted > 100


def test_drafts_end_promised_replies_sooner_where_there_is_slack_and_not_where_there_is_none() -> None:
    """Steps of 10 ms: a pace of 30 ms leaves room for drafts; 10.3 ms leave only what right drafts earn."""
    slow = [(0.0, *request(f"{name}", 20, 60, Slo(2.0, (SloPhase(0, 0.03),)))) for name in "abcd"]
    plain, drafted = served(slow, None), served(slow, 0.0)
    assert drafted.kept(slow) == plain.kept(slow) == (4, 4)
    assert drafted.core.steps < 0.3 * plain.core.steps
    assert drafted.ends_s < 0.4 * plain.ends_s
    tight_s = (LATENCY.base_s(4) + 4 * 90 * LATENCY.context_token_s) / KEPT_SHARE
    tight = [(0.0, *request(f"{name}", 20, 60, Slo(2.0, (SloPhase(0, tight_s),)))) for name in "abcd"]
    assert served(tight, 0.0).kept(tight) == (4, 4)
    held = served(tight, 1.0)
    assert held.kept(tight) == (4, 4)
    assert held.core.proposals.of_sources.verified < 60  # only while contexts are short enough to leave a little time


@pytest.mark.parametrize("kv_tokens", [512, 640])
def test_drafts_have_their_kv_set_aside_where_whole_replies_would_not_fit_together(kv_tokens: int) -> None:
    """KV is promised over time: the short replies end before the long ones need theirs. What is drafted has its KV set aside,
    so that the short ones need not end first; every promise is kept, whether the drafts stand or not."""
    arrivals = [(0.0, *request(name, 20, 100, pace(5.0, 0.05))) for name in "abc"]
    arrivals += [(0.0, *request(name, 60, 30, pace(5.0, 0.05))) for name in "def"]
    assert sum(len(prompt) + (100 if asked.request_id < "d" else 30) for _, asked, prompt in arrivals) > 512
    plain, right, wrong = (served(arrivals, share, kv_tokens=kv_tokens) for share in (None, 0.0, 1.0))
    for run_of in (plain, right, wrong):
        assert run_of.kept(arrivals) == (6, 6)
        assert run_of.core.scheduler.preemptions == 0
    ended_s = [run_of.events["d"][-1][0] for run_of in (right, plain)]
    assert ended_s[0] < 0.7 * ended_s[1]
