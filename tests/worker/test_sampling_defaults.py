"""A model samples by its own defaults where the client sets nothing, and by the client's values where it sets them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.mapper import from_message, to_message
from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.types.sampling import NO_DEFAULTS, SamplingDefaults, SamplingParams
from penstock.worker_service.engine.generation_config import sampling_defaults
from penstock.worker_service.engine.interface import EngineUnusable
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.mesh import served_worker
from tests.support.services import RedisProcess

PROMPT = b"hello"


def folder_with(tmp_path: Path, **values: object) -> Path:
    """The shipped small model with these values in its generation_config.json."""
    folder = tmp_path / "model"
    shutil.copytree(FAMILY / "small", folder, dirs_exist_ok=True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_the_defaults_are_those_of_the_file(tmp_path: Path) -> None:
    assert sampling_defaults(FAMILY / "small") == NO_DEFAULTS
    assert sampling_defaults(tmp_path) == NO_DEFAULTS
    folder = folder_with(tmp_path, temperature=0.6, top_p=0.95, top_k=20, do_sample=False)
    assert sampling_defaults(folder) == SamplingDefaults(0.6, 0.95, 20)
    assert sampling_defaults(folder_with(tmp_path, temperature=None, top_p=1, top_k=-1)) == SamplingDefaults(None, 1, 0)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
    ],
)
def test_defaults_that_cannot_be_are_refused_by_name(tmp_path: Path, values: dict[str, object], field: str) -> None:
    with pytest.raises(EngineUnusable, match=rf"generation_config.json: {field}: must be"):
        sampling_defaults(folder_with(tmp_path, **values))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(EngineUnusable, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)


def test_parameters_without_support_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampling_defaults(folder_with(tmp_path, repetition_penalty=1.05, min_p=0.0))
    assert "repetition_penalty: not supported" in caplog.text
    assert "min_p" not in caplog.text


def test_what_is_not_set_stays_unset_on_its_way_and_is_replaced_once() -> None:
    """Over the wire and back. A value that the client sets is never replaced, though it is the usual one."""
    defaults = SamplingDefaults(0.6, 0.9, 20)
    received = from_message(to_message(SamplingParams(top_p=1.0), common_pb2.SamplingParams), SamplingParams)
    assert received == SamplingParams(top_p=1.0)
    resolved = received.with_defaults(defaults)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.6, 1.0, 20)
    assert resolved.with_defaults(SamplingDefaults(0.1, 0.1, 1)) == resolved
    every = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    assert every.with_defaults(defaults) == every
    assert received.with_defaults(NO_DEFAULTS) == received


async def test_a_worker_samples_by_its_models_defaults(
    tmp_path: Path, redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """Replies without parameters equal those with the defaults set by hand, and no others. Drafts are verified likewise."""
    folder = folder_with(tmp_path, temperature=1.9, top_p=0.9, top_k=3)
    file = mesh_file([{"name": "only", "model": str(folder), "engine": "torch", "kv_tokens": 2048}])
    async with served_worker(file, redis.url) as (stub, _):

        async def reply(**sampling: Any) -> list[int]:
            params = common_pb2.SamplingParams(seed=5, max_tokens=40, ignore_eos=True, **sampling)
            request = pb.GenerateRequest(
                request_id=str(sampling),
                prompt=common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=PROMPT)),
                sampling=params,
            )
            return [token async for event in stub.Generate(request) for token in event.tokens.token_ids]

        own = await reply()
        assert own == await reply(temperature=1.9, top_p=0.9, top_k=3)
        assert own == await reply(top_k=3)
        assert len({tuple(own), tuple(await reply(temperature=1.0)), tuple(await reply(top_k=0, top_p=1.0))}) == 3
        assert await reply(temperature=0.0) == await reply(top_k=1, temperature=1.0)
