"""Speculation in the planner: memory, step times, and the worker's own choice in virtual time."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.drafted_batches import last_paying_batch, simulated
from penstock.planner_service.files.profiles import Profile, write_profile
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.planner_service.simulator.speculation import SimulatedDrafter, speculating_latency
from penstock.planner_service.simulator.tier import serve
from penstock.planner_service.simulator.workload import Workload
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ClusterSpec, GpuSpec, ModelSpec, ReplicaShape, Runtime, fit, roofline
from penstock.services.domain.latency import StepLoad
from tests.support.inputs import read_site

A100 = ClusterSpec(GpuSpec("A100 80 GB", 80e9, 2.039e12, 312e12, 300e9), 1, 8, 25e9)
LARGE = ModelSpec("Llama 2 7B", 32, 4096, 32, 32, 128, 6.74e9, 6.74e9, 2, 524_288)
SMALL = ModelSpec("Llama 160M", 12, 768, 12, 12, 64, 0.162e9, 0.162e9, 2, 36_864)
ONE = ReplicaShape(1, 1)
TARGET = roofline(LARGE, ONE, A100, Runtime())
DRAFTS = roofline(SMALL, ONE, A100, Runtime(step_overhead_s=0.0005))
CONTEXT = 500


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("replies", [1, 16, 128])
def test_the_choice_is_within_three_percent_of_the_enumerated_optimum(share: float, replies: int) -> None:
    """By the formula written out, exploring included."""
    result = simulated(TARGET, [SimulatedDrafter(DRAFTS, share)], replies, context_tokens=CONTEXT, steps=150, seed=3)
    rates = {}
    for window in range(8):
        tokens = sum(share**k for k in range(window + 1))
        rows = replies * (window + 1)
        pass_s = TARGET.step_s(StepLoad(rows, replies * (CONTEXT + window + 1)))
        rates[window] = replies * tokens / (pass_s + window * DRAFTS.step_s(StepLoad(replies, replies * CONTEXT)))
    offered = [rates[window] for window in (0, 1, 2, 3, 5, 7)]
    assert result.best_tokens_per_s == pytest.approx(max(offered), rel=1e-6)
    assert result.alone_tokens_per_s == pytest.approx(rates[0])
    assert 0.97 * max(offered) <= result.chosen_tokens_per_s <= 1.0001 * max(offered)


def test_drafting_stops_paying_where_rows_cost_as_much_as_tokens() -> None:
    """With short contexts and few right tokens; the batch is the last one whose gain is there."""
    drafter = [SimulatedDrafter(DRAFTS, 0.4)]
    batches = [simulated(TARGET, drafter, n, context_tokens=16, steps=1) for n in (1, 8, 64, 256, 512, 1024)]
    last = last_paying_batch(batches)
    assert 64 <= last < 1024
    gains = {b.replies: b.best_tokens_per_s / b.alone_tokens_per_s for b in batches}
    assert gains[1] > 1.3
    assert gains[1024] == 1.0
    assert last_paying_batch(batches, gain=100.0) == 0


def test_drafters_take_memory_that_kv_has_not() -> None:
    plain, drafted = (fit(LARGE, ONE, A100, Runtime(), 1, drafters) for drafters in ((), (SMALL,)))
    room = (80e9 * 0.92 - 1e9) - LARGE.weight_bytes
    assert plain.kv_tokens == int(room / 524_288)
    assert drafted.kv_tokens == int((room - SMALL.weight_bytes) / (524_288 + 36_864))
    half = GpuSpec("small GPU", 16.5e9, 1e12, 1e14, 1e11)
    narrow = ClusterSpec(half, 1, 1, 1e9)
    assert fit(LARGE, ONE, narrow, Runtime(), 1).ok
    refused = fit(LARGE, ONE, narrow, Runtime(), 1, (LARGE,))
    assert not refused.ok
    assert "no room for its weights" in refused.reason


@pytest.mark.parametrize("replies", [1, 8, 64])
def test_a_simulated_tier_decodes_at_the_pace_that_the_choice_predicts(replies: int) -> None:
    """The same kernel, requests and dispatch; only step times differ."""
    drafters = [SimulatedDrafter(DRAFTS, 0.8)]
    fast = speculating_latency(TARGET, drafters, context_tokens=CONTEXT, max_running=64)
    prompt, output = 400, 200
    arrivals = np.zeros(replies)
    work = Workload(arrivals, np.full(replies, prompt, np.int64), np.full(replies, output, np.int64))
    took_s = []
    for latency in (TARGET, fast):
        served = serve(work, [Replica(ONE, latency, 100_000, EngineLimits(max_running=64))])
        took_s.append(float((served.finish_s - served.first_s).mean()))
    expected = simulated(TARGET, drafters, replies, context_tokens=CONTEXT, steps=1)
    gain = expected.best_tokens_per_s / expected.alone_tokens_per_s
    assert gain > 1.2
    assert took_s[0] / took_s[1] == pytest.approx(gain, rel=0.12)  # prompts of others in between gain nothing


def test_step_times_of_prompts_stay_and_never_fall_with_tokens() -> None:
    fast = speculating_latency(TARGET, [SimulatedDrafter(DRAFTS, 0.9)], context_tokens=CONTEXT, max_running=64)
    assert fast.base_s(2048) == pytest.approx(TARGET.base_s(2048))
    times = [fast.base_s(n) for n in (1, 4, 16, 64)]
    later = [fast.base_s(n) for n in (65, 128, 512, 2048)]
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert all(a <= b for a, b in itertools.pairwise(later))
    assert fast.base_s(1) < 0.5 * TARGET.base_s(1)
    assert speculating_latency(TARGET, [], context_tokens=CONTEXT, max_running=64) is TARGET


def test_a_models_file_names_what_drafts(tmp_path: Path) -> None:
    cluster, models = tmp_path / "cluster.yaml", tmp_path / "models.yaml"
    cluster.write_text("gpu: a100-80gb\nnodes: 1\ngpus_per_node: 2\n")
    plain = "tiers:\n  - {name: large, model: llama-2-7b%s}\n"
    small = "{name: llama-160m, layers: 12, hidden: 768, heads: 12, kv_heads: 12, head_dim: 64, parameters: 0.162}"
    models.write_text(plain % f", speculation: {{drafters: [{{model: {small}, acceptance: 0.8}}]}}")
    drafted = read_site(cluster, models)
    models.write_text(plain % "")
    alone = read_site(cluster, models)
    with_drafts, why = drafted.replica(0, ONE, 2000)
    without, _ = alone.replica(0, ONE, 2000)
    assert with_drafts is not None, why
    assert without is not None
    assert with_drafts.kv_tokens < without.kv_tokens
    assert with_drafts.latency.base_s(1) < 0.6 * without.latency.base_s(1)
    write_profile(tmp_path / "x.json", Profile("large", "torch", "here", without, ((StepLoad(1, 1), 0.1),), 0.0))
    models.write_text(plain % f", profiles: [x.json], speculation: {{drafters: [{{model: {small}, acceptance: 0.8}}]}}")
    with pytest.raises(InvalidRequest, match="speculation: not with profiles"):
        read_site(cluster, models)
