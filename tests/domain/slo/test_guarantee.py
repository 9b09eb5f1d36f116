"""With exact step times and known lengths, no admitted request misses its SLO, on one replica or on several."""

import itertools

import numpy as np
import pytest

from planner_service.simulator.attainment_kernel import Slos, new_judgement
from planner_service.simulator.fleet_replica import FleetLimits, FleetOutcome, FleetRequests
from planner_service.simulator.judged import NEVER_LATER
from planner_service.simulator.slo_fleet import ADMITTED, DECLINED, serve_fleet
from services.domain.latency import StepLatencyModel
from services.domain.slo.compiled.layout import step_model

LATENCIES = (
    StepLatencyModel.linear(0.005, 1e-4, 1e-7),
    StepLatencyModel((1.0, 64.0, 256.0, 1024.0), (0.02, 0.021, 0.05, 0.3), 3e-7, 2e-8, 1e-7),
    StepLatencyModel.linear(0.0, 1e-3, 0.0),
    StepLatencyModel.linear(0.01, 1e-4, 1e-6),
)
PACES_S = np.array([0.03, 0.05, 0.07, 0.1, np.inf])
WORKLOADS = 10_000


@pytest.mark.slow
def test_no_admitted_request_misses_in_10_000_random_workloads() -> None:
    """Bursts and trickles, one pace and many, short and long, scarce and ample KV, with and without best effort and reserve.

    First tokens and every window of ten gaps are judged. Every request that is not declined ends, best effort included.
    """
    totals = dict.fromkeys(("requests", "admitted", "declined", "best effort", "preempted"), 0)
    for seed in range(WORKLOADS):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 25))
        mean_gap_s = rng.choice([0.0, 0.02, 0.1, 0.3])
        arrival_s = np.cumsum(rng.exponential(mean_gap_s, n)) if mean_gap_s else np.zeros(n)
        prompt, output = rng.integers(1, rng.choice([20, 200, 1000]), n), rng.integers(1, rng.choice([5, 30, 100]), n)
        asks = rng.random(n) >= rng.choice([0.0, 0.3])
        ttft_s = np.where(asks, rng.choice([0.1, 0.3, 1.0, 3.0], n), np.inf)
        tpot_s = np.where(asks, PACES_S[rng.integers(len(PACES_S), size=n)] if rng.random() < 0.7 else 0.05, np.inf)
        model = step_model(
            LATENCIES[rng.integers(len(LATENCIES))], int(rng.choice([64, 512, 2048])), float(rng.choice([0.0, 0.1]))
        )
        kv_tokens = max(int((prompt + output).max()) + 2, int(rng.choice([500, 3000, 100_000])))
        places, decline = int(rng.choice([4, 16, 64])), bool(rng.random() < 0.5)
        replicas = int(rng.choice([1, 1, 1, 2, 3]))
        hops, value = int(rng.integers(0, replicas)), np.ones(n)
        slos = Slos(arrival_s + ttft_s, tpot_s, tpot_s, np.full(n, NEVER_LATER))
        requests = FleetRequests(arrival_s, prompt, output, output, tpot_s, value)
        limits = FleetLimits(kv_tokens, places, hops, 0.001, decline, bool(seed % 2), n)
        judgement, out = new_judgement(n), FleetOutcome(*np.zeros((2, n)), *np.zeros((3, n), np.int64))
        serve_fleet(requests, slos, PACES_S, model, replicas, limits, judgement, out)
        first_s, finish_s, outcome, preemptions = out.first_s, out.finish_s, out.outcome, out.preemptions
        admitted = outcome == ADMITTED
        assert not (admitted & (first_s > arrival_s + ttft_s + 1e-6)).any(), f"a first token is late, seed {seed}"
        assert not judgement.misses[admitted].any(), f"a pace is broken, seed {seed}"
        assert (finish_s[outcome != DECLINED] > 0).all(), f"a request did not end, seed {seed}"
        assert not preemptions[admitted].any(), f"an admitted request was preempted, seed {seed}"
        counted = (
            n,
            admitted.sum(),
            (outcome == DECLINED).sum(),
            (~admitted & (outcome >= 0)).sum(),
            preemptions.sum(),
        )
        for name, count in zip(totals, counted, strict=True):
            totals[name] += int(count)
    shares = {name: count / totals["requests"] for name, count in totals.items()}
    assert 0.3 < shares["admitted"] < 0.95, (
        shares
    )  # load enough that not all are admitted, and most work is under promise
    assert min(itertools.islice(shares.values(), 2, None)) > 0.02, shares


def test_requests_that_become_best_effort_do_not_harm_those_admitted_before() -> None:
    """Without a reserve, too: what time is left over is used as soon as a request has been turned down.

    Long replies on an OPT-13B-like replica at a rate of which four fifths are admitted. With certificates that assumed that
    what is left over stays unused, five of a hundred workloads broke the pace of some twenty replies at a time.
    """
    latency = StepLatencyModel((1.0, 32.0, 256.0, 4096.0), (0.02, 0.021, 0.043, 0.39), 6e-7, 1.25e-8)
    n, admitted_share = 150, []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        arrival_s = np.cumsum(rng.exponential(1 / 2.6, n))
        prompt = rng.integers(500, 1950, n)
        output = np.clip(rng.exponential(250, n), 1, 1500).astype(np.int64)
        due_s, tpot_s = arrival_s + 3 * (0.02 + 1e-4 * prompt), np.full(n, 0.1)
        requests = FleetRequests(arrival_s, prompt, output, output, tpot_s, np.ones(n))
        limits = FleetLimits(57_000, 256, 0, 0.001, False, True, n)
        judgement, out = new_judgement(n), FleetOutcome(*np.zeros((2, n)), *np.zeros((3, n), np.int64))
        slos = Slos(due_s, tpot_s, tpot_s, np.full(n, NEVER_LATER))
        serve_fleet(requests, slos, PACES_S, step_model(latency, 4096, 0.0), 1, limits, judgement, out)
        admitted = out.outcome == ADMITTED
        assert not (admitted & (out.first_s > due_s + 1e-6)).any(), f"a first token is late, seed {seed}"
        assert not judgement.misses[admitted].any(), f"a pace is broken, seed {seed}"
        admitted_share.append(admitted.mean())
    assert 0.7 < np.mean(admitted_share) < 0.9
