"""Drafts in steps with promised SLOs: they take only time that no promise needs."""

import random

import pytest

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.services.domain.slo.compiled.layout import KEPT_SHARE
from penstock.services.domain.slo.draft_windows import DraftPace, PacedDecode, longest_windows, tightened_pace
from penstock.services.domain.slo.speculation import SpeculationTier, plan_of, speculation_lengths
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.slo import Slo, SloPhase
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.simulated.engine import simulated_core
from penstock.worker_service.scheduling.policies import PolicyName
from tests.support.draft_sources import KnownReply
from tests.support.virtual_clock import VirtualClock
from tests.worker.test_slo_engine import LATENCY, options, pace, request, run

PACE = DraftPace(0.8, 1e-4)


def windows(decodes: list[PacedDecode], latency: StepLatencyModel, *, prompts_wait: bool) -> list[int]:
    return longest_windows(
        decodes,
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
    decodes = [PacedDecode(0.02, -1.0)] * 10 + [PacedDecode(0.1, -1.0)] * 20
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
    behind, ahead = windows([PacedDecode(0.03, 0.2), PacedDecode(0.03, -0.02)], latency, prompts_wait=True)
    assert behind > ahead
    assert speculation_lengths([SpeculationTier(1, 0.03, 0.8)], latency, max_step_tokens=4096) is not None


def test_where_no_length_keeps_the_pace_prompts_get_what_is_left() -> None:
    latency = StepLatencyModel.linear(1.0, 0.0, 0.0)
    assert windows([PacedDecode(0.05, 0.0)], latency, prompts_wait=True) == [0]


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
