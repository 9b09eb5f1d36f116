"""Models read without transformers' models: the same weights, the same results, and none of the imports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, load_model
from penstock.worker_service.engine.torch.forward import FusedForward
from penstock.worker_service.engine.torch.plain_model import PlainModel, read_config, read_model
from penstock.worker_service.engine.torch.supported import cpu_flags, dtype_on
from tests.conftest import FAMILY, ROOT
from tests.worker.test_fused_forward import hidden_states, model_of

READ_HERE = ("llama", "llama-biases", "qwen2", "qwen3")


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    model_of(name, torch.float32).save_pretrained(str(folder), **options)
    return folder


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def read(folder: Path, dtype: str = "auto") -> PlainModel:
    config = read_config(folder)
    assert config is not None
    return read_model(folder, config, dtype)


@pytest.mark.parametrize("name", READ_HERE)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several files"])
def test_it_computes_what_transformers_model_computes(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    expected, model = model_of(name, torch.float32), read(saved(tmp_path, name, **options))
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(options)
    ours = hidden_states(FusedForward(model, compiled=False), model, None)
    theirs = hidden_states(FusedForward(expected, compiled=False), expected, None)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    hidden = torch.randn(3, expected.config.hidden_size)
    assert torch.equal(model.lm_head(hidden), expected.lm_head(hidden))
    assert model.num_parameters() == expected.num_parameters()


def test_a_head_that_is_the_embedding_is_one_tensor() -> None:
    model = read(FAMILY / "small")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32, "as config.json says, though the file is in bfloat16"
    assert read(FAMILY / "small", "bfloat16").dtype == torch.bfloat16


def test_half_precision_is_for_what_has_instructions_for_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    changed(folder, dtype="bfloat16")
    able, plain = frozenset({"avx2", "amx_bf16"}), frozenset({"avx2", "avx512_fp16"})
    assert (dtype_on("cpu", "auto", folder, able), dtype_on("cpu", "auto", folder, plain)) == ("auto", "float32")
    assert dtype_on("cuda:1", "auto", folder, plain) == "auto"
    assert dtype_on("cpu", "bfloat16", folder, plain) == "bfloat16"
    assert "fpu" in cpu_flags() or "fp" in cpu_flags()


@pytest.mark.parametrize("name", ["llama3-rope", "llama-yarn"])
def test_other_rotary_positions_are_left_to_transformers(tmp_path: Path, name: str) -> None:
    assert read_config(saved(tmp_path, name)) is None
    assert not isinstance(load_model(tmp_path, TorchEngineOptions(tmp_path, "m")), PlainModel)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},
        {"model_type": "gpt2"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"quantization_config": {"bits": 4}},
        {"use_sliding_window": True},
        {"num_key_value_heads": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert read_config(saved(tmp_path)) is not None
    changed(tmp_path, **fields)
    assert read_config(tmp_path) is None


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    weights = load_file(saved(tmp_path) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for value, problem in ((None, f"no weights '{name}'"), (torch.zeros(2, 2), f"'{name}' is")):
        rest = {key: tensor for key, tensor in weights.items() if key != name}
        save_file(rest if value is None else rest | {name: value}, tmp_path / "model.safetensors")
        with pytest.raises(EngineUnusable, match=problem):
            load_model(tmp_path, TorchEngineOptions(tmp_path, "m"))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineUnusable, match=str(tmp_path)):
        load_model(tmp_path, TorchEngineOptions(tmp_path, "m"))


@pytest.mark.slow
def test_a_shipped_model_is_served_without_the_imports_of_transformers_models() -> None:
    code = """
import sys
from pathlib import Path
from penstock.services.clock import SystemClock
from penstock.worker_service.engine.torch.engine import TorchEngineOptions
from penstock.worker_service.engine.torch.engine import torch_core
torch_core(TorchEngineOptions(Path("models/family/small"), "small", kv_tokens=1024), SystemClock())
print([name for name in ("torch._dynamo", "transformers.modeling_utils") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
