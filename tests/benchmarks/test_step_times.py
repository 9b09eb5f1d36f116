"""Step times against published tables: how tables are read, and that a fit finds what made one."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.step_times import (
    COVERED,
    Row,
    band,
    best_shapes,
    engine_named,
    estimate,
    figures,
    fitted,
    rows_of,
    workload,
)
from penstock.planner_service.files.hardware import engine_of_catalogue
from penstock.services.domain.hardware import EngineSpec

HEADER = "gpu,tp,model,engine,num_prompts_all_at_once,prompt_set,output_tokens_per_s,inter_token_latency_ms\n"


def test_tables_are_read_and_others_are_not(tmp_path: Path) -> None:
    table, other = tmp_path / "table.csv", tmp_path / "other.csv"
    table.write_text(HEADER + "A100-80GB-SXM,2,Mistral-7B-Instruct-v0.3,vllm-0.5.4,320,ShareGPT,1861.61,53.52\n")
    other.write_text("gpu,mem_gb\na100,80\n")
    assert rows_of(table) == [Row("a100-80gb", 2, "mistral-7b", "vllm-0.5", 320, 1861.61, 53.52 / 1e3)]
    assert rows_of(other) == []


def test_an_engine_is_named_by_its_version() -> None:
    assert engine_named("vllm-0.5.4") == "vllm-0.5"
    assert engine_named("vllm-0.11") == "vllm"
    assert engine_named("sglang-0.5.3") == "sglang"
    with pytest.raises(KeyError):
        engine_named("another")


def test_the_workload_has_sharegpts_lengths() -> None:
    work = workload(320)
    assert work.input_tokens.mean() == pytest.approx(230, rel=0.02)
    assert work.output_tokens.mean() == pytest.approx(223, rel=0.02)
    assert work.output_tokens.min() >= 1


def test_a_fit_finds_the_cpu_that_made_a_table() -> None:
    """Rows as the simulator has them with such a CPU: throughput of others is met, by a roofline alone it is not."""
    known = engine_of_catalogue("vllm-0.5")
    true = dataclasses.replace(known, cpu=dataclasses.replace(known.cpu, request_s=3e-4, prompt_s=5e-3))
    rows = []
    for model, tp, prompts in (("mistral-7b", 1, 40), ("mistral-7b", 4, 40), ("llama-3.1-8b-fp8", 2, 40)):
        row = Row("a100-80gb", tp, model, "vllm-0.5", prompts, 1.0, 1.0)
        one = estimate(row, true)
        rows.append(dataclasses.replace(row, tokens_per_s=one.tokens_per_s, token_s=one.token_s))
    found = fitted(rows[:2], known)
    held_out = figures(rows[2:], found)
    assert held_out["throughput_error_median"] < 0.02
    assert figures(rows[2:], EngineSpec("kernels"))["throughput_error_median"] > 0.3
    assert best_shapes(rows, true) == (1, 1)
    assert found.cpu.step_s == known.cpu.step_s


def test_a_band_holds_what_it_says_of_further_rows() -> None:
    rng, inside = np.random.default_rng(1), []
    for _ in range(500):
        times = np.exp(rng.normal(0.1, 0.2, 9))
        fast, slow = band(times[:8].tolist(), 8)
        inside.append(fast <= times[8] <= slow)
    assert np.mean(inside) == pytest.approx(COVERED, abs=0.03)
    few, many = band([0.9, 1.0, 1.2, 1.3], 2), band([0.9, 1.0, 1.2, 1.3], 4)
    assert few[1] > many[1] > 1.3  # rows of one model are no news of others
