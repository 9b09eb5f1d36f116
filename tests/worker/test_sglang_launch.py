"""How SGLang servers are started, and what a worker does with one that cannot run. Needs no SGLang."""

import sys
from pathlib import Path

import numpy as np
import pytest

from services.domain import SamplingParams
from services.mesh_file import load_mesh_file
from services.settings import ServiceSettings
from tests.conftest import FAMILY, MeshFileMaker
from worker_service.compose import build_engine
from worker_service.engine.interface import EngineUnusable
from worker_service.engine.sglang import SglangEngine, SglangEngineOptions
from worker_service.engine.sglang.launch import ServerShape, command, environment, gpus_of
from worker_service.speculation.top_k import target_distribution


def flags_of(shape: ServerShape) -> dict[str, str]:
    """Options by name; switches have no value."""
    argv = command(shape, 30_000)
    assert argv[:3] == [shape.python, "-m", "sglang.launch_server"]
    found, name = dict[str, str](), ""
    for part in argv[3:]:
        if part.startswith("--"):
            name = part
            found[name] = ""
        else:
            found[name] = part
    return found


def test_every_setting_reaches_the_command_line(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    tier = {
        "name": "only",
        "model": "m",
        "engine": "sglang",
        "served_model_name": "known-as",
        "device": "cuda:1",
        "dtype": "bfloat16",
        "threads": 3,
        "kv_block_tokens": 32,
        "max_running": 40,
        "max_queued": 60,
        "max_step_tokens": 2050,
        "max_context_tokens": 8192,
        "workers": 2,
        "sglang": {
            "python": "/opt/sglang/bin/python",
            "tp": 2,
            "pp": 3,
            "dp": 1,
            "gpus": list(range(12)),
            "mem_fraction": 0.8,
            "deterministic": True,
            "kv_store": "store",
            "port": 31_000,
            "flags": ["--log-level", "warning"],
            "env": {"NCCL_DEBUG": "WARN"},
        },
    }
    file = mesh_file([tier])
    engine = build_engine(load_mesh_file(file).tiers[0], ServiceSettings.load(mesh_file=file, worker_index=1))
    assert isinstance(engine, SglangEngine)
    assert engine.options.port == 31_001
    assert engine.options.max_requests == 100
    shape = engine.options.launch
    assert shape is not None
    flags = flags_of(shape)
    wanted = {
        "--model-path": str(tmp_path / "m"),
        "--served-model-name": "known-as",
        "--port": "30000",
        "--device": "cuda",
        "--base-gpu-id": "1",
        "--dtype": "bfloat16",
        "--tp-size": "2",
        "--pp-size": "3",
        "--dp-size": "1",
        "--page-size": "32",
        "--chunked-prefill-size": "2048",  # whole pages
        "--max-running-requests": "40",
        "--max-queued-requests": "100",
        "--mem-fraction-static": "0.8",
        "--context-length": "8192",
        "--hicache-storage-backend": "file",
        "--log-level": "warning",
    }
    assert {name: flags.get(name) for name in wanted} == wanted
    assert "--enable-deterministic-inference" in flags
    assert "--skip-tokenizer-init" not in flags, "forms of replies need it"
    tier["sglang"]["structured_output"] = False  # type: ignore[index]
    spared = build_engine(
        load_mesh_file(mesh_file([tier])).tiers[0], ServiceSettings.load(mesh_file=file, worker_index=1)
    )
    assert isinstance(spared, SglangEngine)
    assert spared.options.launch is not None
    assert "--skip-tokenizer-init" in flags_of(spared.options.launch)
    assert "--max-total-tokens" not in flags
    assert environment(shape) == {
        "OMP_NUM_THREADS": "3",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "CUDA_VISIBLE_DEVICES": "6,7,8,9,10,11",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store"),
        "NCCL_DEBUG": "WARN",
    }
    plain = flags_of(ServerShape("python", "m", "m", kv_tokens=777))
    assert plain["--max-total-tokens"] == "777"
    assert not {"--mem-fraction-static", "--context-length", "--enable-hierarchical-cache", "--enable-trace"} & set(
        plain
    )
    assert flags_of(ServerShape("python", "m", "m", trace_to="c:4317"))["--otlp-traces-endpoint"] == "c:4317"


def test_each_worker_has_its_own_gpus() -> None:
    assert [gpus_of((4, 5, 6, 7), i, 2) for i in range(2)] == [(4, 5), (6, 7)]
    assert gpus_of((), 5, 2) == ()
    with pytest.raises(ValueError, match="no 2 GPUs for worker 2 among 4"):
        gpus_of((4, 5, 6, 7), 2, 2)


async def test_a_server_that_cannot_run_ends_the_start_with_a_word() -> None:
    """This Python has no sglang: every start ends at once."""
    launch = ServerShape(sys.executable, "m", "m")
    engine = SglangEngine(SglangEngineOptions(FAMILY / "small", "m", launch=launch))
    with pytest.raises(EngineUnusable, match="ends whenever it is started"):
        await engine.start()


def test_a_distribution_from_the_likeliest_tokens_is_the_whole_ones_or_none() -> None:
    """Against top-p over all logprobs, for every number of tokens told."""
    rng, vocab = np.random.default_rng(4), 12
    told_enough = 0
    for _ in range(200):
        logits = rng.normal(size=(2, vocab)) * rng.uniform(0.5, 4)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        sampling = SamplingParams(temperature=float(rng.uniform(0.3, 1.5)), top_p=float(rng.choice([0.5, 0.9, 1.0])))
        whole = np.exp(logprobs / sampling.temperature)
        whole /= whole.sum(1, keepdims=True)
        for row in whole:
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= sampling.top_p]] = 0.0
            row /= row.sum()
        for top in (1, 3, 8, vocab):
            rows = [[(int(t), float(row[t])) for t in np.argsort(-row)[:top]] for row in logprobs]
            found = target_distribution(rows, vocab, sampling)
            if found is not None:
                np.testing.assert_allclose(found, whole, atol=1e-9)
                told_enough += top < vocab
            assert found is not None or top < vocab
    assert told_enough > 50
    greedy = target_distribution([[(3, -0.1)]], vocab, SamplingParams(temperature=0.0))
    assert greedy is not None
    assert greedy.tolist() == [[float(t == 3) for t in range(vocab)]]
