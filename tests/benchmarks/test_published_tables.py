"""Published tables as profiles: what a step is put together from, faults by line and column, the real tables."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_tables import (
    ATTENTION,
    COLLECTIVES,
    LINEAR,
    Wanted,
    import_distserve,
    import_vidur,
)
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.simulator import EngineLimits
from penstock.question_files.errors import FileError
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape, Runtime
from penstock.services.domain.latency import StepLoad
from tests.conftest import ROOT
from tests.support.present import present

PERF = ROOT.parent / "shared" / "data" / "perf"
NAME = "meta-llama/Llama-2-7b-hf"  # 32 layers, 32 heads of 128, all with KV of their own
LAYERS, HIDDEN = 32, 4096


def wanted(tp: int = 1, pp: int = 1, name: str = NAME, spec: str = "llama-2-7b", **more: Any) -> Wanted:
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), 1, 8, 25e9)
    runtime = Runtime(step_overhead_s=0.001)
    return Wanted(name, model_of_catalogue(spec), ReplicaShape(tp, pp), cluster, runtime, EngineLimits(), **more)


def written(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(rows)
    return path


def linear_ms(tokens: float, tp: int) -> float:
    return 0.2 + 0.002 * tokens / tp


def tables(folder: Path, measured_tp: int = 1) -> list[Path]:
    """Vidur's three tables, of times that are linear in everything."""
    ops = [("a100", NAME, LAYERS, tp, n, 0.003, linear_ms(n, tp)) for tp in (1, 2) for n in (1, 8, 64, 256, 1024, 2048)]
    shape = (HIDDEN, 32, 32, measured_tp)
    attention: list[tuple[Any, ...]] = [
        (*shape, batch, 0, cached, "", 1e-5 * batch * (cached + 1) / measured_tp)
        for batch in (1, 2, 4, 8, 16, 32, 64)
        for cached in (32, 512, 1024, 2048)
    ]
    attention += [
        (*shape, 1, chunk, cached, 1e-6 * chunk * (cached + 0.5 * (chunk + 1)) / measured_tp, "")
        for chunk in (64, 128, 512, 1024, 2048)
        for cached in (0, 512, 1024, 2048)
    ]
    network = [
        (topology, name, 2, 2, size, 0.01 + 1e-8 * size)
        for topology in ("a100_dgx", "a100_pairwise")
        for name in ("all_reduce", "send_recv")
        for size in (2048, 2**20, 2**26)
    ]
    return [
        written(folder / "linear.csv", LINEAR, ops),
        written(folder / "attention.csv", ATTENTION, attention),
        written(folder / "network.csv", COLLECTIVES, network),
    ]


@pytest.mark.parametrize("measured_tp", [1, 2])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_step_is_its_layers_and_what_passes_between_gpus(tp: int, pp: int, measured_tp: int, tmp_path: Path) -> None:
    """Attention measured on shards of another size is scaled to ours."""
    found = import_vidur(tables(tmp_path, measured_tp), wanted(tp, pp, topology="a100_dgx"))
    for load, attention_ms in (
        (StepLoad(16, 16 * 700), 1e-5 * 16 * 700),
        (StepLoad(512, 768, 512 * (256 + 256.5)), 1e-6 * 512 * (256 + 256.5)),
    ):
        sent = load.tokens * HIDDEN * 2
        layer = linear_ms(load.tokens, tp) + attention_ms / tp + (2 * (0.01 + 1e-8 * sent) if tp > 1 else 0)
        handover = 0.01 + 1e-8 * sent if pp > 1 else 0
        assert found.replica.latency.step_s(load) == pytest.approx(
            (1 + LAYERS * layer + 0.003 + handover) / 1e3, rel=0.03
        )
    assert present(found.held_out_error) < 0.03
    # 80 GB each, weights 6.74e9 * 2, KV of half a megabyte for a token
    assert found.replica.kv_tokens == pytest.approx((tp * pp * (80e9 * 0.92 - 1e9) - 13.48e9) / 524_288, rel=1e-3)


def formulas(**changed: Any) -> dict[str, Any]:
    entry = {
        "threshold": 64,
        "prefill": [10.0, 0.1, 2e-6],
        "decode_small_batch": [10.0, 5e-4, 0.1],
        "decode_large_batch": [10.0, 5e-4, 0.1],
    }
    return {"_source": "ours", "distserve": {"m": {"1": entry | changed}}}


def test_distserves_formulas_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "formulas.json"
    path.write_text(json.dumps(formulas()))
    found = import_distserve(path, wanted(name="m"))
    assert present(found.held_out_error) < 0.05
    step_s = found.replica.latency.step_s
    assert step_s(StepLoad(1000, 1000, 1000 * 500.5)) == pytest.approx(0.112, rel=0.05)
    assert step_s(StepLoad(40, 40 * 900)) == pytest.approx(0.032, rel=0.05)
    for content, said in (
        ("{", "not JSON: .* line 1 column 2"),
        ("[]", "file: no 'distserve'; there are none"),
        ({"vllm": {}}, "file: no 'distserve'; there are vllm"),
        ({"distserve": {"m": {"2": {}}}}, "distserve.m: no '1'; there are 2"),
        (formulas(prefill=[1, 2]), r"distserve.m.1.prefill: must be three numbers"),
        (formulas(prefill=[1, "x", 2]), r"distserve.m.1.prefill\[1\]: must be a number, not 'x'"),
        (formulas(threshold=0), r"threshold: must be a whole number from 1, not 0"),
        (formulas(decode_large_batch=[-90, 0, 0.1]), r"decode_large_batch: gives -83.6 ms for 64 contexts"),
        (formulas(_warning="unsound"), r"the file itself warns: unsound"),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(FileError, match=said):
            import_distserve(path, wanted(name="m"))
    with pytest.raises(FileError, match="No such file"):
        import_distserve(tmp_path / "no.json", wanted(name="m"))


@pytest.mark.skipif(
    not PERF.is_dir(), reason="needs the published tables in ../shared/data/perf, which are not part of this project"
)
def test_the_published_tables() -> None:
    vidur = wanted(4, name="meta-llama/Llama-2-70b-hf", spec="llama-2-70b", topology="a100_dgx")
    opt = wanted(4, name="facebook/opt-66b", spec="opt-66b")
    for found in (
        import_vidur(sorted(PERF.glob("vidur_*.csv.gz")), vidur),
        import_distserve(next(PERF.glob("distserve_*.json")), opt),
    ):
        assert 0 < present(found.held_out_error) < 0.04
