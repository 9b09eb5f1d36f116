"""SLOs in a worker's engine: who is told that its SLO is kept, and that it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock.services.clock import SystemClock
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.services.domain.slo.compiled import admission, certified_step, table
from penstock.services.domain.slo.reply_length import MIN_REPLIES, ReplyLengths
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema import MeshFile, MeshTier
from penstock.services.settings import ServiceSettings
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloPhase
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.compose import build_engine
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.latency_fit import fitted, measured_latency
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_core
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core
from penstock.worker_service.scheduling.policies import PolicyName
from penstock.worker_service.telemetry.load_tracker import LoadTracker
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
    clock = VirtualClock()
    core, _ = simulated_core(options(max_running=64), clock)
    slo = pace(0.4, 0.05)
    arrivals = [(0.02 * (i // 10), *request(f"r{i:02}", 300, 20, slo)) for i in range(40)]
    events = run(core, clock, list(arrivals))
    kept = 0
    for arrival_s, asked, _ in arrivals:
        _, admitted = events[asked.request_id][0]
        assert isinstance(admitted, Admitted)
        assert isinstance(events[asked.request_id][-1][1], EngineFinished)
        frames = [(at_s, e) for at_s, e in events[asked.request_id] if isinstance(e, TokenFrame)]
        assert sum(len(e.token_ids) for _, e in frames) == 20
        if not admitted.slo_kept:
            continue
        kept += 1
        tracker = AttainmentTracker(arrival_s + 0.4 + 0.05)  # received when the step under way had ended
        for at_s, _ in frames:
            tracker.token(at_s, 0.05)
        assert tracker.result().attained, asked.request_id
    assert 5 <= kept < 40


def test_without_an_slo_or_with_another_policy_a_request_is_best_effort_at_once() -> None:
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    for slo in (None, Slo()):
        admitted, _ = core.add(*request("a" if slo is None else "b", 10, 2, slo))
        assert not present(admitted).slo_kept
    core, _ = simulated_core(options(PolicyName.DECODE_FIRST), clock)
    admitted, _ = core.add(*request("a", 10, 2, pace(5.0, 1.0)))
    assert not present(admitted).slo_kept


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
    rng = np.random.default_rng(0)
    true = StepLatencyModel((0.0, 1.0), (0.012, 0.0121), 2e-7, 3e-9)
    loads = [StepLoad(int(t), int(c), float(p)) for t, c, p in rng.uniform((1, 16, 0), (512, 60_000, 1e5), (200, 3))]
    found = fitted([(load, true.step_s(load) * rng.lognormal(0, 0.02)) for load in loads])
    errors = [found.step_s(load) / true.step_s(load) - 1 for load in loads]
    assert max(map(abs, errors)) < 0.03
    assert fitted([(StepLoad(n, 0), 0.01) for n in range(1, 30)]).step_s(StepLoad(5, 100)) == pytest.approx(0.01)

    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    measured = measured_latency(core, seconds=60.0, now=clock.now)
    assert core.idle
    for load in (StepLoad(8, 800), StepLoad(256, 256)):
        assert measured.step_s(load) == pytest.approx(LATENCY.step_s(load), rel=0.02)


def test_the_reply_is_reserved_by_a_quantile_of_the_latest() -> None:
    lengths = ReplyLengths(0.9)
    assert lengths.predict(0, 500) == 500  # nothing is known yet
    for tokens in range(1, 101):
        lengths.add(tokens)
    assert lengths.predict(0, 500) == 91
    assert lengths.predict(0, 40) == 40
    assert lengths.predict(50, 500) == 96  # of those that are longer than it is already
    assert lengths.predict(100 - MIN_REPLIES + 1, 500) == 500


def test_the_policy_changes_when_tokens_come_and_never_which(tiny_models: dict[str, Path]) -> None:
    """Real logits under all three policies, a burst with and without SLOs: the same replies to the last token."""
    replies = []
    for policy in PolicyName:
        core, _ = torch_core(
            TorchEngineOptions(tiny_models["llama"], "tiny", batch_policy=policy, max_step_tokens=24, max_running=4),
            SystemClock(),
        )
        for i in range(6):
            core.add(*request(f"r{i}", 12 + i, 8, pace(30.0, 5.0) if i % 2 else None))
        found: dict[str, list[int]] = {}
        classes = set()
        while not core.idle:
            for name, event in core.step():
                if isinstance(event, TokenFrame):
                    found.setdefault(name, []).extend(event.token_ids)
                elif isinstance(event, Admitted):
                    classes.add(not event.slo_kept)
        assert classes == ({False} if policy is PolicyName.SLO else set())
        replies.append(found)
    assert replies[0] == replies[1] == replies[2]
    assert all(len(tokens) == 8 for tokens in replies[0].values())


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
