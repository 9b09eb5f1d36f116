"""Drafted tokens in virtual time: which stand, and what they bring. test_guarantee.py shows that they break no promise."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.slo_baselines import BatchPolicy, Deployment, Disaggregated, PlainReplicas
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.drafts import NO_DRAFTS, best_window, drafts_of, standing, window_s
from penstock.planner_service.simulator.judged import Promises, SloReplicas
from penstock.planner_service.simulator.speculation import SimulatedDrafter
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.compiled.layout import step_model

LATENCY = StepLatencyModel.linear(0.01, 1e-4, 1e-7)
REPLICA = Replica(ReplicaShape(1, 1), LATENCY, 20_000, EngineLimits(64, 512))
DRAFTER = SimulatedDrafter(StepLatencyModel.linear(0.0005, 1e-5, 0.0), 0.7)


def test_as_many_stand_as_the_acceptance_says_and_always_the_same() -> None:
    for acceptance in (0.0, 0.3, 0.7, 1.0):
        counts = [standing(r, p, 4, acceptance) for r in range(100) for p in range(100)]
        assert counts == [standing(r, p, 4, acceptance) for r in range(100) for p in range(100)]
        assert np.mean(counts) == pytest.approx(sum(acceptance**k for k in range(1, 5)), abs=0.05)


def test_a_window_is_the_one_of_most_tokens_per_second() -> None:
    """Against pricing every window by itself; and none where a step is cheap and drafting is not."""
    model = step_model(replace(LATENCY, pair_s=0.0), 4096)
    drafts = drafts_of(DRAFTER)
    for decodes in (1, 8, 64):
        took_s = LATENCY.base_s(decodes)
        per_s = [
            sum(0.7**k for k in range(w + 1)) / (took_s + window_s(w, decodes, decodes, 0.0, model, drafts))
            for w in range(8)
        ]
        assert best_window(took_s, decodes, decodes, 0.0, 10_000, model, drafts) == int(np.argmax(per_s))
    costly = drafts._replace(fixed_s=1.0)
    assert best_window(LATENCY.base_s(8), 8, 8, 0.0, 10_000, model, costly) == 0
    assert best_window(LATENCY.base_s(8), 8, 8, 0.0, 15, model, drafts) == 1, "no more than there is room for"
    assert drafts_of(None) == NO_DRAFTS


def test_every_policy_ends_replies_sooner_with_drafts() -> None:
    """A light load: all is attained as without drafts, and the last tokens come in well under the time."""
    work = Workload(np.arange(6, dtype=np.float64) * 2.0, np.full(6, 100), np.full(6, 200))
    slos = Promises.of_one_phase(np.full(6, 0.5), np.full(6, 0.05))
    deployments: list[Deployment] = [
        SloReplicas(REPLICA),
        *(PlainReplicas(REPLICA, policy) for policy in BatchPolicy),
        Disaggregated(REPLICA, 1, 1, 1e-6),
    ]
    for deployment in deployments:
        plain, drafted = deployment.serve(work, slos), replace(deployment, drafter=DRAFTER).serve(work, slos)
        assert plain.attained.all()
        assert drafted.attained.all()
        assert drafted.first_s == pytest.approx(plain.first_s, abs=0.02)
        gained = (plain.finish_s - plain.first_s) / (drafted.finish_s - drafted.first_s)
        assert (gained > 1.5).all(), deployment
        useless = replace(deployment, drafter=replace(DRAFTER, acceptance=0.0)).serve(work, slos)
        assert useless.finish_s == pytest.approx(plain.finish_s)


def test_replies_that_draft_keep_to_the_kv() -> None:
    """Blocks for few replies at once: all end, with drafts and without."""
    work = Workload(np.zeros(20), np.full(20, 50), np.full(20, 100))
    slos = Promises.of_one_phase(np.full(20, 100.0), np.full(20, 1.0))
    narrow = replace(REPLICA, kv_tokens=640)
    for policy in BatchPolicy:
        judged = PlainReplicas(narrow, policy, drafter=DRAFTER).serve(work, slos)
        assert (judged.finish_s > 0).all()
