"""The GPU benchmark on a CPU with a tiny shape: what it measures, what fits into its time, and what it does without a GPU."""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu, report
from benchmarks.__main__ import main as benchmarks_main
from benchmarks.gpu import real_model
from benchmarks.gpu.__main__ import main as gpu_main
from benchmarks.gpu.measures import LOADS, TimeBudget, forecasts, profiled
from benchmarks.gpu.shapes import TINY, shape_of
from benchmarks.gpu.subjects import Subject, TorchSubject, torch_subject
from benchmarks.public_data import NO_GPU_STATUS
from penstock.planner_service.files.profiles import read_profile, write_profile
from penstock.planner_service.simulator import EngineLimits, Replica, Served, Workload, serve
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel

STEPS = 300
LATENCY = StepLatencyModel.linear(1e-3, 1e-5, 1e-7)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with torch_subject(TINY, "cpu", tmp_path_factory.mktemp("gpu"), seed=1) as subject:
        yield subject


def enough_after(steps: int) -> Callable[[], bool]:
    count = itertools.count()
    return lambda: next(count) >= steps


def test_steps_become_a_profile_that_the_planner_reads(subject: Subject, tmp_path: Path) -> None:
    """The engine is idle afterwards: it can be measured again."""
    samples = subject.samples(1, enough_after(STEPS))
    assert len(samples) == STEPS
    profile = profiled(subject, ("tiny", "cpu"), samples)
    write_profile(tmp_path / "profile.json", profile)
    read = read_profile(tmp_path / "profile.json")
    assert read.replica == profile.replica
    assert read.replica.limits == EngineLimits(TINY.max_running, TINY.max_step_tokens, 16)
    assert read.replica.kv_tokens == TINY.kv_tokens
    assert read.held_out_error is not None
    assert len(subject.samples(1, enough_after(10))) == 10


def test_an_engine_is_gone_before_the_next_one_starts(tmp_path: Path) -> None:
    """Though its subject is still at hand, as in the loop over the shapes: on a GPU its KV leaves no room for another."""
    with torch_subject(TINY, "cpu", tmp_path, seed=1) as subject:
        assert isinstance(subject, TorchSubject)
        core = weakref.ref(subject.core)
        assert core() is not None
    assert core() is None


def test_a_replay_gives_every_request_its_tokens(subject: Subject) -> None:
    """The first token is never before the arrival, nor after the last one."""
    work = Workload(np.array([0.0, 0.0, 5.0]), np.array([20, 30, 8]), np.array([4, 8, 1]))
    served = subject.serve(work, 1)
    assert (served.first_s > work.arrival_s).all()
    assert (served.finish_s >= served.first_s).all()
    assert served.finish_s[2] == served.first_s[2]


def simulated(latency: StepLatencyModel = LATENCY) -> Replica:
    return Replica(ReplicaShape(1, 1), latency, 8192, EngineLimits(16, 128, 16))


def replayed(work: Workload, _seed: int) -> Served:
    """On an engine that is the simulator itself."""
    return serve(work, [simulated()])


def test_forecasts_of_an_engine_that_is_the_simulator_have_no_error() -> None:
    """And one whose steps take twice as long is seen: its forecasts are too low."""
    exact = forecasts(replayed, TINY, simulated(), 1, TimeBudget(1e6))
    assert [row["load"] for row in exact] == list(LOADS)
    assert all(error == 0 for row in exact for error in row["error"].values())
    fast = StepLatencyModel.linear(0.5e-3, 0.5e-5, 0.5e-7)
    wrong = forecasts(replayed, TINY, simulated(fast), 1, TimeBudget(1e6))
    assert all(row["error"]["ttft_p50"] < -0.2 for row in wrong)


@pytest.mark.slow
def test_the_command_writes_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However little time it has: what it could not measure is counted."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    result = gpu.measure([TINY], ["torch"], "cpu", limit_s=6.0, name="gpu_cpu")
    assert (tmp_path / "gpu_cpu.json").exists()
    (row,) = result["engines"]
    assert (row["shape"], row["engine"]) == ("tiny", "torch")
    if "skipped" not in row:
        assert (tmp_path / row["profile"]).exists()
        assert len(row["forecasts"]) + row["forecasts_left_out"] == len(LOADS)
    assert "tiny torch" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("main", "arguments"), [(benchmarks_main, ["gpu"]), (gpu_main, ["--shape", "tiny"])])
def test_without_a_gpu_it_ends_with_its_own_status(
    main: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == NO_GPU_STATUS
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_from_a_folder_is_compared_with_its_replies_in_float32_on_the_cpu() -> None:
    shape = replace(shape_of(Path("models/family/small")), kv_tokens=8192, max_running=16)
    assert (shape.name, shape.vocabulary) == ("small", 264)
    exact, rounded = real_model.exactness(shape, "cpu", prompts=2, tokens=8)
    assert (exact["dtype"], exact["same"], exact["differing"]) == ("float32", 2, [])
    assert rounded["same"] + len(rounded["differing"]) == 2


def test_replies_differ_at_their_first_other_token() -> None:
    truth = [(1, 0.5), (2, 0.25), (3, 1.0)]
    assert real_model.first_difference(truth, truth) is None
    assert real_model.first_difference(truth, [(1, 0.5), (4, 0.1), (3, 1.0)]) == {"at": 1, "lead": 0.25}
    assert real_model.first_difference(truth, truth[:2]) == {"at": 2, "lead": None}
