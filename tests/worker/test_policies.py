"""Three policies behind one interface: what each does with the same requests, and what promises the SLO policy keeps."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from penstock.planner_service.simulator.attainment_kernel import Slos, new_judgement
from penstock.planner_service.simulator.fleet_replica import FleetLimits, FleetRequests, Run, new_outcome
from penstock.planner_service.simulator.judged import NEVER_LATER
from penstock.planner_service.simulator.slo_fleet import serve_fleet
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.slo.attainment import PACE_WINDOW_TOKENS, AttainmentTracker
from penstock.services.domain.slo.compiled.layout import KEPT_SHARE, LATE_PACES, step_model
from penstock.services.domain.slo.correction import LatencyCorrection
from penstock.types.sampling import SamplingParams
from penstock.types.slo import SloClass
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.policies import DecodeFirst, PrefillFirst
from penstock.worker_service.scheduling.sequence import Sequence, SequenceSlo
from penstock.worker_service.scheduling.slo_policy import SloPolicy
from penstock.worker_service.scheduling.steps import BatchPolicy

GREEDY = SamplingParams(temperature=0.0)
SIX_PER_UNIT = StepLatencyModel.linear(0.0, 1 / 6, 0.0)
PACE = 1 / KEPT_SHARE
"""A promise for which a token a unit is kept."""


@dataclass(frozen=True)
class Request:
    """One request of a workload; ttft_s None: it asks for no SLO."""

    arrival_s: float
    prompt: int
    output: int
    ttft_s: float | None = None
    tpot_s: float = math.inf
    decline: bool = True


@dataclass
class Served:
    """When every token came, by request; who was admitted; who was preempted; the plan of each step."""

    tokens_s: dict[int, list[float]] = field(default_factory=dict)
    admitted: set[int] = field(default_factory=set)
    declined: set[int] = field(default_factory=set)
    preempted: list[int] = field(default_factory=list)
    steps: list[list[tuple[str, int]]] = field(default_factory=list)


def serve(
    requests: list[Request],
    policy: BatchPolicy,
    latency: StepLatencyModel,
    *,
    limits: BatchLimits,
    pool: BlockPool,
    predict: float = 1.0,
    late_s: Callable[[], float] = float,
) -> Served:
    """A worker's scheduler in virtual time; predict: of a reply's length, 1 for known lengths. late_s: of each step's end."""
    scheduler, found = BatchScheduler(limits, pool, policy), Served()
    upcoming, now_s = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s), 0.0
    while upcoming or not scheduler.idle:
        if scheduler.idle:
            now_s = max(now_s, requests[upcoming[0]].arrival_s)
        while upcoming and requests[upcoming[0]].arrival_s <= now_s:
            i = upcoming.pop(0)
            one = requests[i]
            likely = max(1, round(predict * one.output))
            slo = SequenceSlo(one.arrival_s + one.ttft_s, one.tpot_s, likely) if one.ttft_s is not None else None
            prompt = [i * 10_000 + k for k in range(one.prompt)]
            scheduler.add(Sequence(str(i), prompt, GREEDY, max_output_tokens=one.output, slo=slo))
        for sequence in scheduler.policy.decide(scheduler, now_s):
            if sequence.promised:
                found.admitted.add(int(sequence.request_id))
            elif requests[int(sequence.request_id)].decline:
                found.declined.add(int(sequence.request_id))
                scheduler.finish(sequence.request_id)
        plan = scheduler.plan_step(now_s=now_s)
        found.preempted += [int(name) for name in plan.preempted]
        if not plan.chunks:
            assert upcoming or scheduler.idle, "a step without work"
            continue
        context = sum(c.start + c.count for c in plan.chunks)
        now_s += latency.step_s(StepLoad(plan.tokens, context)) + late_s()
        scheduler.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.logits}, now_s)
        found.steps.append([(c.sequence.request_id, c.count) for c in plan.chunks])
        for chunk in plan.chunks:
            if chunk.logits:
                found.tokens_s.setdefault(int(chunk.sequence.request_id), []).append(now_s)
                if chunk.sequence.output_tokens >= chunk.sequence.max_output_tokens:
                    scheduler.finish(chunk.sequence.request_id)
    assert pool.free == pool.count
    return found


def drawn(rng: random.Random, best_effort: float, paces: tuple[float, ...], most: int = 16) -> list[Request]:
    now_s, requests = 0.0, []
    gap_s, longest, outputs = rng.choice([0.0, 0.02, 0.1]), rng.choice([20, 200, 600]), rng.choice([5, 30, 60])
    for _ in range(rng.randint(1, most)):
        now_s += rng.expovariate(1 / gap_s) if gap_s else 0.0
        asks = rng.random() >= best_effort
        requests.append(
            Request(
                now_s,
                rng.randint(1, longest),
                rng.randint(1, outputs),
                rng.choice([0.1, 0.3, 1.0, 3.0]) if asks else None,
                rng.choice(paces),
                decline=best_effort == 0,
            )
        )
    return requests


def test_without_slos_the_steps_are_exactly_those_of_decode_first() -> None:
    latency = StepLatencyModel.linear(0.01, 1e-4, 1e-6)
    for seed in range(50):
        rng = random.Random(seed)
        requests = drawn(rng, 1.0, (math.inf,))
        limits = BatchLimits(rng.randint(1, 8), rng.choice([7, 64, 512]))
        blocks = -(-max(r.prompt + r.output for r in requests) // 4) + rng.randint(0, 60)
        plain = serve(requests, DecodeFirst(), latency, limits=limits, pool=BlockPool(blocks, 4))
        under_slos = serve(requests, SloPolicy(latency, 0.1), latency, limits=limits, pool=BlockPool(blocks, 4))
        assert under_slos == plain, seed


def attained(request: Request, tokens_s: list[float]) -> bool:
    """Whether tokens came as the request asked."""
    assert request.ttft_s is not None
    tracker = AttainmentTracker(request.arrival_s + request.ttft_s)
    for at_s in tokens_s:
        tracker.token(at_s, None if math.isinf(request.tpot_s) else request.tpot_s)
    return tracker.result().attained


def figure_3(policy: BatchPolicy, *, slos: bool) -> Served:
    """6 tokens per unit; three decodes; at time 1 four prompts of 6 tokens, 6 units to the first token, then one each."""
    running = [Request(0.0, 2, 60, 2.0 if slos else None, PACE) for _ in range(3)]
    burst = [Request(1.0, 6, 60, 6.0 if slos else None, PACE) for _ in range(4)]
    return serve([*running, *burst], policy, SIX_PER_UNIT, limits=BatchLimits(16, 6), pool=BlockPool(4000, 1))


def worst_window(times: list[float]) -> float:
    return max(b - a for a, b in zip(times, times[PACE_WINDOW_TOKENS:], strict=False))


def worst_gap(times: list[float]) -> float:
    return max(b - a for a, b in itertools.pairwise(times))


def test_figure_3_prefill_first_stalls_decodes_and_decode_first_delays_prompts() -> None:
    """What the paper's example says of each: stalls of four units; the third prompt done 11 units after it came."""
    prefill = figure_3(PrefillFirst(), slos=False)
    assert [prefill.tokens_s[i][0] for i in range(3, 7)] == pytest.approx([2.0, 3.0, 4.0, 5.0])
    assert worst_gap(prefill.tokens_s[0]) >= 4.0
    decode = figure_3(DecodeFirst(), slos=False)
    assert [decode.tokens_s[i][0] - 1.0 for i in (3, 4, 5)] == pytest.approx([2.0, 5.0, 11.0])
    assert decode.tokens_s[6][0] - 1.0 > 11.0


def test_figure_3_slos_keep_every_promise_and_decline_one() -> None:
    served = figure_3(SloPolicy(SIX_PER_UNIT, 0.0), slos=True)
    assert served.admitted == {0, 1, 2, 3, 4, 5}
    assert served.declined == {6}
    assert all(served.tokens_s[i][0] <= 7.0 + 1e-6 for i in (3, 4, 5))
    assert max(worst_window(served.tokens_s[i]) for i in range(6)) <= PACE_WINDOW_TOKENS * PACE + 1e-6


@pytest.mark.parametrize("policy", [DecodeFirst, PrefillFirst])
def test_every_policy_serves_any_workload_to_the_last_token(policy: type[BatchPolicy]) -> None:
    latency = StepLatencyModel.linear(0.01, 1e-4, 1e-6)
    for seed in range(40):
        rng = random.Random(seed)
        requests = drawn(rng, 1.0, (math.inf,))
        blocks = -(-max(r.prompt + r.output for r in requests) // 4) + rng.randint(0, 20)
        limits = BatchLimits(rng.randint(1, 6), rng.choice([7, 64, 512]))
        served = serve(requests, policy(), latency, limits=limits, pool=BlockPool(blocks, 4))
        assert [len(served.tokens_s[i]) for i in range(len(requests))] == [r.output for r in requests]


def test_prefill_first_computes_nothing_beside_a_prompt() -> None:
    latency = StepLatencyModel.linear(0.01, 1e-4, 0.0)
    requests = [Request(0.0, 4, 30), Request(0.05, 40, 5), Request(0.05, 40, 5)]
    served = serve(requests, PrefillFirst(), latency, limits=BatchLimits(8, 16), pool=BlockPool(100, 4))
    prompts = [step for step in served.steps if any(count > 1 for _, count in step)]
    assert len(prompts) >= 6
    assert all(name != "0" for step in prompts[1:] for name, _ in step)


def test_worker_and_simulator_agree_to_the_last_token() -> None:
    """The same admissions, and every first and last token at the same instant, over random workloads."""
    admitted = best_effort = 0
    for seed in range(60):
        rng = random.Random(seed)
        latency = rng.choice([StepLatencyModel.linear(0.005, 1e-4, 1e-7), StepLatencyModel.linear(0.01, 2e-4, 1e-6)])
        requests = [replace(one, decline=False) for one in drawn(rng, 0.0, (0.03, 0.05, 0.1))]
        kv, places, tokens = rng.choice([900, 5000]), rng.choice([4, 16]), rng.choice([64, 512])
        pool = BlockPool(kv, 1, reuse=False)
        served = serve(requests, SloPolicy(latency, 0.0), latency, limits=BatchLimits(places, tokens), pool=pool)
        n = len(requests)
        arrival_s, tpot_s = np.array([r.arrival_s for r in requests]), np.array([r.tpot_s for r in requests])
        prompt, output = (
            np.array(row, np.int64) for row in zip(*((r.prompt, r.output) for r in requests), strict=True)
        )
        ttft_s = np.array([r.ttft_s for r in requests], np.float64)
        out = new_outcome(n, 1)
        run = Run(
            FleetRequests(arrival_s, prompt, output, tpot_s),
            Slos(arrival_s + ttft_s, tpot_s, tpot_s, np.full(n, NEVER_LATER)),
            KEPT_SHARE * np.array([0.03, 0.05, 0.1]),
            step_model(latency, tokens, places=places),
            FleetLimits(kv, 0),
            new_judgement(n),
            out,
        )
        serve_fleet(run, 1)
        assert served.admitted == set(np.flatnonzero(out.admitted).tolist()), seed
        for i in range(n):
            assert served.tokens_s[i][0] == pytest.approx(out.first_s[i], abs=1e-9), seed
            assert served.tokens_s[i][-1] == pytest.approx(out.finish_s[i], abs=1e-9), seed
        admitted += len(served.admitted)
        best_effort += n - len(served.admitted)
    assert admitted > 180
    assert best_effort > 15


def test_promises_hold_beside_best_effort_in_blocks_of_kv() -> None:
    """Admitted requests miss nothing and keep their KV; best effort ends, and loses KV but never a token."""
    counted = dict.fromkeys(("admitted", "best effort", "preempted"), 0)
    for seed in range(100):
        rng = random.Random(seed)
        latency = rng.choice([StepLatencyModel.linear(0.005, 1e-4, 1e-7), StepLatencyModel.linear(0.0, 1e-3, 0.0)])
        requests = drawn(rng, 0.4, (0.03, 0.05, 0.07, 0.1, math.inf))
        longest = -(-max(r.prompt + r.output for r in requests) // 4)
        pool = BlockPool(longest + 1 + rng.choice([0, 40, 1000]), 4)
        limits = BatchLimits(rng.choice([3, 16]), rng.choice([64, 512]))
        served = serve(requests, SloPolicy(latency, rng.choice([0.0, 0.1])), latency, limits=limits, pool=pool)
        for i, one in enumerate(requests):
            assert len(served.tokens_s[i]) == one.output, seed
            if i in served.admitted:
                assert attained(one, served.tokens_s[i]), (seed, i)
        assert not served.admitted & set(served.preempted), seed
        counted["admitted"] += len(served.admitted)
        counted["best effort"] += len(requests) - len(served.admitted)
        counted["preempted"] += len(served.preempted)
    assert min(counted.values()) > 10, counted


def test_steps_that_all_end_late_break_no_promise() -> None:
    """Each by up to LATE_PACES, next to best effort that fills the steps; predictions do not learn from it."""

    class Steady(LatencyCorrection):
        def add(self, predicted_s: float, actual_s: float) -> None:
            pass

    latency, pace_s, late = StepLatencyModel.linear(0.005, 1e-3, 0.0), 0.05, 0
    for seed in range(20):
        promised = [Request(0.01 * i, 5, 80, 1.0, pace_s) for i in range(3)]
        others = [Request(0.02 * i, 300, 5) for i in range(20)]
        policy = SloPolicy(latency, 0.1, Steady())
        each_s = partial(random.Random(seed).choice, [share * LATE_PACES * pace_s for share in (0.0, 0.5, 0.99)])
        limits, pool = BatchLimits(16, 64), BlockPool(20_000, 1)
        served = serve([*promised, *others], policy, latency, limits=limits, pool=pool, late_s=each_s)
        assert served.admitted == {0, 1, 2}
        assert all(attained(promised[i], served.tokens_s[i]) for i in range(3)), seed
        late += sum(worst_gap(served.tokens_s[i]) > pace_s for i in range(3))
    assert late > 0


@pytest.mark.parametrize("predict", [0.3, 3.0])
def test_replies_of_other_lengths_than_predicted_end_and_early_ones_break_nothing(predict: float) -> None:
    """Who outgrows the KV kept for the reply costs others theirs at worst, never the engine's progress.

    Replies that end early only make room: release times keep decodes from beginning before they were counted.
    """
    late = admitted = preempted = 0
    for seed in range(60):
        rng = random.Random(seed)
        latency = rng.choice([StepLatencyModel.linear(0.005, 1e-4, 1e-7), StepLatencyModel.linear(0.0, 1e-3, 0.0)])
        requests = drawn(rng, rng.choice([0.0, 0.3]), (0.03, 0.05, 0.1))
        pool = BlockPool(-(-max(r.prompt + r.output for r in requests) // 4) + rng.choice([1, 40]), 4)
        policy, limits = SloPolicy(latency, rng.choice([0.0, 0.1])), BatchLimits(16, rng.choice([64, 512]))
        served = serve(requests, policy, latency, limits=limits, pool=pool, predict=predict)
        assert all(len(served.tokens_s[i]) == r.output for i, r in enumerate(requests) if i not in served.declined)
        preempted += len(served.admitted & set(served.preempted))
        admitted += len(served.admitted)
        late += sum(not attained(requests[i], served.tokens_s[i]) for i in served.admitted)
    assert admitted > 120
    if predict > 1:
        assert (late, preempted) == (0, 0)
    else:
        assert late <= 0.02 * admitted


def test_a_preempted_best_effort_reply_resumes_by_one_prefill() -> None:
    """An admission takes its KV; its tokens stay, and it goes on behind them once there is room."""
    latency = StepLatencyModel.linear(0.005, 1e-4, 0.0)
    pool = BlockPool(20, 4, reuse=False)
    requests = [Request(0.0, 40, 30), Request(0.06, 40, 10, 0.5, 0.05)]
    served = serve(requests, SloPolicy(latency, 0.0), latency, limits=BatchLimits(4, 64), pool=pool)
    assert served.admitted == {1}
    assert served.preempted == [0]
    resumed = [count for step in served.steps for name, count in step if name == "0" and count > 1]
    assert len(resumed) == 2
    assert resumed[1] > 40  # prompt and what was generated, in one go
    assert len(served.tokens_s[0]) == 30


def test_a_decision_sets_the_class_once() -> None:
    latency = StepLatencyModel.linear(0.005, 1e-4, 0.0)
    policy = SloPolicy(latency, 0.0)
    scheduler = BatchScheduler(BatchLimits(4, 64), BlockPool(100, 4), policy)
    sound = Sequence("a", [1] * 8, GREEDY, max_output_tokens=4, slo=SequenceSlo(1.0, 0.05, 4))
    late = Sequence("b", [2] * 8, GREEDY, max_output_tokens=4, slo=SequenceSlo(-1.0, 0.05, 4))
    for one in (sound, late):
        scheduler.add(one)
    assert scheduler.policy.decide(scheduler, 0.0) == [sound, late]
    assert [one.slo and one.slo.granted for one in (sound, late)] == [SloClass.STANDARD, SloClass.BEST_EFFORT]
    assert scheduler.policy.decide(scheduler, 0.1) == []


def test_a_worker_that_was_slow_promises_again_once_its_steps_are_fast() -> None:
    """Twenty times slower for a while: nothing can be promised then, so it is steps without promises that must show that."""
    usual = StepLatencyModel.linear(0.01, 1e-4, 0.0)
    slow = StepLatencyModel.linear(0.2, 2e-3, 0.0)
    policy, limits = SloPolicy(usual, 0.0), BatchLimits(8, 256)
    promised = [Request(0.5 * i, 100, 20, 5.0, 0.1) for i in range(4)]
    serve(promised, policy, slow, limits=limits, pool=BlockPool(1000, 4))
    assert policy.correction.factor == pytest.approx(20.0)
    assert not serve(promised, policy, slow, limits=limits, pool=BlockPool(1000, 4)).admitted
    plain = [Request(0.0, 100, 300) for _ in range(4)]
    serve(plain, policy, usual, limits=limits, pool=BlockPool(1000, 4))
    assert policy.correction.factor == pytest.approx(1.0)
    assert len(serve(promised, policy, usual, limits=limits, pool=BlockPool(1000, 4)).admitted) == 4
