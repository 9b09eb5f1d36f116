"""Measured step times: loads read off real steps, the fit, the file."""

import itertools
import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.planner_service.files.profiles import (
    IDENTIFIED,
    context_uncertainty,
    fit_qoe,
    read_profile,
    write_profile,
)
from penstock.question_files.errors import FileError
from penstock.services.clock import SystemClock
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.latency_fit import fit_latency
from penstock.services.domain.stages.qoe import request_cost_s
from penstock.types.plans import QoeModel
from penstock.worker_service.engine.profile import DECODES, load_of, measure
from penstock.worker_service.engine.qoe_profile import measure_qoe, profile_cells
from penstock.worker_service.engine.runner import Row
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core
from tests.conftest import FAMILY

TRUE = StepLatencyModel((1.0, 8.0, 64.0, 512.0), (0.002, 0.003, 0.01, 0.09), 2e-7, 3e-8, 1e-8)


def test_the_fit_finds_the_model_that_made_the_samples() -> None:
    rng = np.random.default_rng(1)
    loads = [
        StepLoad(int(t), int(t * rng.integers(1, 900)), float(rng.integers(0, 90_000)), int(rng.integers(0, 30_000)))
        for t in rng.integers(1, 512, 400)
    ]
    fitted, error = fit_latency([(load, TRUE.step_s(load) * rng.normal(1, 0.01)) for load in loads])
    assert error < 0.02
    for load in loads[:50]:
        assert fitted.step_s(load) == pytest.approx(TRUE.step_s(load), rel=0.06)
    with pytest.raises(InvalidRequest, match="samples"):
        fit_latency([(StepLoad(1, 1), 0.1), (StepLoad(2, 2), 0.2)])


def test_a_steps_load_is_counted_as_the_model_counts() -> None:
    def row(start: int, count: int) -> Row:
        return Row([0] * count, start, [], 1, None, 0)  # type: ignore[arg-type]

    assert load_of([row(0, 4)]) == StepLoad(4, 4, 1 + 2 + 3 + 4, 0)
    assert load_of([row(6, 2)]) == StepLoad(2, 8, 7 + 8, 0)
    assert load_of([row(9, 1), row(4, 1)]) == StepLoad(2, 15, 0, 5)
    assert load_of([row(9, 1), row(0, 3)]) == StepLoad(4, 13, 6, 0)


def test_an_engine_is_measured_and_left_as_it_was() -> None:
    options = TorchEngineOptions(FAMILY / "small", "small", kv_tokens=2048, max_running=4, max_step_tokens=64)
    core, _ = torch_core(options, SystemClock())
    runner, free = core.runner, core.scheduler.pool.free
    seen: list[tuple[int, int]] = []
    samples = measure(core, on_progress=lambda done, of: seen.append((done, of)))
    assert core.runner is runner
    assert core.idle
    assert core.scheduler.pool.free == free
    assert seen[-1][0] == seen[-1][1]
    assert {1, 2, 4} <= {load.tokens for load, _ in samples if load.pairs == 0}
    assert max(load.tokens for load, _ in samples) == 64
    assert any(load.longest_gap > 0 for load, _ in samples)
    assert all(seconds > 0 for _, seconds in samples)
    assert len(samples) > 5 * DECODES
    model, error = fit_latency(samples)
    assert error < 1
    assert model.step_s(StepLoad(4, 100)) > 0


def test_batches_are_measured_over_whole_lives_and_leave_the_engine_as_it_was() -> None:
    """Each slot gives one request that lived among as many as the batch is large; clock ticks stand for seconds."""
    options = TorchEngineOptions(FAMILY / "small", "small", kv_tokens=1024, max_running=4, max_step_tokens=64)
    core, _ = torch_core(options, SystemClock())
    free, ticks = core.scheduler.pool.free, itertools.count()
    cells = profile_cells(core)
    assert {(c.from_tokens, c.to_tokens, c.requests) for c in cells} >= {(32, 64, 1), (32, 64, 4), (256, 512, 1)}
    assert max(c.requests * c.to_tokens for c in cells) <= 1024
    samples = measure_qoe(core, [c for c in cells if c.to_tokens <= 128], seed=2, clock=lambda: float(next(ticks)))
    assert core.idle
    assert core.scheduler.pool.free == free
    assert len(samples) >= 2 * (1 + 2 + 4)  # more where several end in the last step
    assert {round(load.requests) for load, _ in samples} == {1, 2, 4}
    for (n, inputs, squared, tokens), cost_s in samples:
        assert n * 32 * 0.5 < tokens < n * 128
        assert inputs < tokens
        assert squared >= inputs * inputs / n * 0.99
        assert cost_s > 0


def test_measuring_batches_ends_with_its_time_and_leaves_the_engine_idle() -> None:
    """In the middle of a cell, too; the small cells come first."""
    options = TorchEngineOptions(FAMILY / "small", "small", kv_tokens=1024, max_running=4, max_step_tokens=64)
    core, _ = torch_core(options, SystemClock())
    cells, ticks = profile_cells(core), itertools.count()
    samples = measure_qoe(core, cells, clock=lambda: float(next(ticks)), most_s=200.0)
    assert samples
    assert next(ticks) < 300
    assert core.idle
    sizes = [cell.requests * cell.to_tokens for cell in cells]
    assert sizes == sorted(sizes)


@pytest.mark.slow
def test_the_measured_batches_tell_the_cost_of_inputs_from_that_of_lengths_so_far() -> None:
    options = TorchEngineOptions(FAMILY / "small", "small", kv_tokens=2048, max_running=8, max_step_tokens=256)
    core, _ = torch_core(options, SystemClock())
    ticks, rng = itertools.count(), np.random.default_rng(3)
    loads = [load for load, _ in measure_qoe(core, profile_cells(core), clock=lambda: float(next(ticks)))]
    true = QoeModel(1e-3, 1e-4, 2e-6, 0.0, 2e-6)
    samples = [(load, request_cost_s(true, load) * rng.normal(1, 0.1)) for load in loads]
    found = fit_qoe(samples)
    assert context_uncertainty(found, samples) < IDENTIFIED
    assert found.context_token_s == pytest.approx(true.context_token_s, rel=0.2)


def test_a_profile_from_the_command_line_and_back(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    done = CliRunner().invoke(
        app, ["profile", str(FAMILY / "small"), "--out", str(out), "--max-running", "2", "--kv-tokens", "1024"]
    )
    assert done.exit_code == 0, done.output
    found = read_profile(out)
    assert found.model == "small"
    assert found.replica.kv_tokens == 1024
    assert found.qoe is not None
    assert 0 < found.qoe_error < math.inf  # how large it is depends on what else the machine does meanwhile
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, float32
    again = tmp_path / "again.json"
    write_profile(again, found)
    assert json.loads(again.read_text()) == json.loads(out.read_text())
    assert CliRunner().invoke(app, ["profile", str(tmp_path)]).exit_code == 2
    for text, said in (("{}", "format"), ("[]", "not a profile"), ("{", "not a profile")):
        again.write_text(text)
        with pytest.raises(FileError, match=said):
            read_profile(again)
    with pytest.raises(FileError, match="No such file"):
        read_profile(tmp_path / "no.json")


def test_a_profile_may_do_without_a_qoe_model(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = ["profile", str(FAMILY / "small"), "--out", str(out), "--max-running", "2", "--kv-tokens", "1024"]
    done = CliRunner().invoke(app, [*command, "--no-qoe", "--json"])
    assert done.exit_code == 0, done.output
    assert read_profile(out).qoe is None
    printed = json.loads(done.output)
    assert (printed["qoe"], printed["qoe_requests"]) == (None, 0)
    assert printed["samples"] > 0


def test_what_the_machine_has_no_room_for_is_named(tmp_path: Path) -> None:
    """An engine that cannot be built is one line by the setting's name, not torch's traceback."""
    small, out = str(FAMILY / "small"), str(tmp_path / "profile.json")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 * 2**30, hard))  # that no system promises more memory than it has
    try:
        for option, value in (("--kv-tokens", str(2**31 - 1)), ("--device", "abacus")):
            done = CliRunner().invoke(app, ["profile", small, "--out", out, option, value])
            assert done.exit_code == 2, done.output
            assert isinstance(done.exception, SystemExit)
            assert option.strip("-").replace("-", "_") in done.output
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    tiny = ("--kv-tokens", "64", "--max-running", "1", "--max-step-tokens", "1")
    done = CliRunner().invoke(app, ["profile", small, "--out", out, *tiny])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
    assert "samples" in done.output
