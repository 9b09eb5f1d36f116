"""2,000 malformed requests: each gets a clear refusal that names its field, none a fault or a hang."""

import asyncio
import copy
import json
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from penstock.common.v1 import common_pb2
from penstock.router.v1 import router_pb2 as pb
from penstock.router.v1 import router_pb2_grpc
from services.testing import RedisProcess
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh, running_mesh

HTTP_COUNT, GRPC_COUNT = 1000, 1000


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    async with running_mesh(mesh_file(), redis.url) as running:
        yield running


SOUND_CHAT: dict[str, Any] = {
    "model": "cascade",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "max_tokens": 4,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
}
SOUND_TEXT: dict[str, Any] = {
    "model": "small",
    "prompt": "hello",
    "temperature": 0.5,
    "max_tokens": 4,
    "stop": "x",
    "logprobs": 1,
}
JUNK: list[Any] = [
    None, "", "x" * 300, "\ud800", -1, 0, 1.5, 2**63, -(2**70), 10**400, math.inf, math.nan, True, [], [[]], [None],
    {}, {"a": 1}, [{"role": 5}], "null", "\x00", ["a", 1], [[1, -1]], [2**40],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A request with something wrong, most of the time: a junk value, a lost or unknown field, broken bytes."""
    path, sound = rng.choice((("/v1/chat/completions", SOUND_CHAT), ("/v1/completions", SOUND_TEXT)))
    body = copy.deepcopy(sound)
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        spots = places(body)
        if not spots:
            break
        *way, last = rng.choice(spots)
        inner = body
        for key in way:
            inner = inner[key]
        if kind < 0.75:
            inner[last] = copy.deepcopy(rng.choice(JUNK))
        elif kind < 0.85:
            del inner[last]
        elif isinstance(inner, dict):
            inner[rng.choice(("tools", "functions", "top_k", "é", "__proto__"))] = rng.choice(JUNK[1:6])
    data = json.dumps(body).encode()
    if rng.random() < 0.15:
        cut = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            cut[rng.randrange(len(cut))] = rng.randrange(256)
        data = bytes(cut[: rng.randint(0, len(cut))])
    return path, data


async def test_malformed_http_requests_are_refused_by_field(mesh: TestMesh) -> None:
    rng = random.Random(2024)
    refused = served = 0
    places_at_once = asyncio.Semaphore(16)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:

        async def one(path: str, data: bytes) -> tuple[int, Any]:
            async with places_at_once, session.post(mesh.http + path, data=data) as response:
                said = await response.read()  # a sound one may have asked for a stream
                return response.status, json.loads(said) if response.content_type == "application/json" else said

        requests = [mutated(rng) for _ in range(HTTP_COUNT)]
        answers = await asyncio.gather(*(one(*r) for r in requests))
    for (_, data), (status, body) in zip(requests, answers, strict=True):
        assert status in (200, 400, 404), (status, data, body)
        if status == 200:  # the change left it sound
            served += 1
            continue
        refused += 1
        error = body["error"]
        assert error["message"], data
        assert error["param"], (data, error)
        assert error["param"] in error["message"] or status == 404
    assert refused > HTTP_COUNT * 0.7
    assert served > 0


def fuzzed_proto(rng: random.Random) -> pb.GenerateRequest:
    """A request whose fields are junk of the right type: the wire lets nothing else through."""
    request = pb.GenerateRequest(
        model=rng.choice(("cascade", "small", "large", "huge", "", "x" * 1000)),
        priority=rng.choice((0, 0, 5, -(2**31), 2**31 - 1)),
    )
    kind = rng.random()
    if kind < 0.3:
        for _ in range(rng.randint(0, 3)):
            request.prompt.chat.messages.add(
                role=rng.choice(("user", "user", "assistant", "robot", "")), content=rng.choice(("", "hi", "\x00"))
            )
        request.prompt.chat.SetInParent()
    elif kind < 0.5:
        request.prompt.text = rng.choice(("", "hello", "\x00", "é" * 50))
    elif kind < 0.8:
        request.prompt.token_ids.ids.extend(rng.choice((0, 5, 300, 2**32 - 1)) for _ in range(rng.randint(0, 4)))
        request.prompt.token_ids.SetInParent()
    for field in common_pb2.SamplingParams.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            set_junk(request.sampling, field, rng)
    if rng.random() < 0.3:
        request.slo.time_to_first_token.seconds = rng.choice((0, -1, 5, 315_576_000_000))
        request.slo.phases.add(from_output_token_count=rng.choice((0, 2**32 - 1)))
    if rng.random() < 0.3:
        request.request_id = rng.choice(("", "r", "x" * 129, "a\nb"))
    if rng.random() < 0.3:
        request.resume.tier = rng.choice(("", "small", "huge"))
        request.resume.token_ids.extend(rng.choice((1, 2**32 - 1)) for _ in range(rng.randint(0, 3)))
    return request


def set_junk(message: Any, field: FieldDescriptor, rng: random.Random) -> None:
    junk: dict[int, tuple[Any, ...]] = {
        FieldDescriptor.TYPE_DOUBLE: (0.0, 0.5, 1.0, -1.0, 1e300, math.inf, math.nan),
        FieldDescriptor.TYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
        FieldDescriptor.TYPE_UINT32: (0, 1, 3, 21, 2**32 - 1),
        FieldDescriptor.TYPE_STRING: ("", "x", "y" * 300),
        FieldDescriptor.TYPE_BOOL: (True, False),
    }
    values = junk[field.type]
    if field.name == "ignore_eos":
        message.ignore_eos = False
    elif field.name == "stop":
        message.stop.extend(rng.choice(values) for _ in range(rng.randint(0, 18)))
    else:
        setattr(message, field.name, rng.choice(values))


async def test_malformed_grpc_requests_are_refused_by_field(mesh: TestMesh) -> None:
    rng = random.Random(2025)
    codes: dict[grpc.StatusCode, int] = {}
    places_at_once = asyncio.Semaphore(16)
    async with aio.insecure_channel(mesh.router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def one(request: pb.GenerateRequest) -> aio.AioRpcError | None:
            async with places_at_once:
                try:
                    async for _ in stub.Generate(request, timeout=30):
                        pass
                except aio.AioRpcError as error:
                    return error
            return None

        requests = [fuzzed_proto(rng) for _ in range(GRPC_COUNT)]
        answers = await asyncio.gather(*map(one, requests))
        for request, error in zip(requests, answers, strict=True):
            if error is None:
                codes[grpc.StatusCode.OK] = codes.get(grpc.StatusCode.OK, 0) + 1
                continue
            codes[error.code()] = codes.get(error.code(), 0) + 1
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), (request, error)
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                assert fields_of(error), (request, error)
        # bytes that are no message at all
        raw: Any = channel.unary_stream("/penstock.router.v1.RouterService/Generate")
        for data in (b"\xff\xff\xff", b"\x0a\xff", b"\x12\x02\x0a"):
            with pytest.raises(aio.AioRpcError):
                async for _ in raw(data, timeout=30):
                    pass
        async for _ in stub.Generate(pb.GenerateRequest(model="small", prompt=common_pb2.Prompt(text="x")), timeout=30):
            pass  # alive and well
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > GRPC_COUNT * 0.5
    assert codes[grpc.StatusCode.OK] > 0


def fields_of(error: aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    found = []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found += [v.field for v in bad.field_violations]
    return found
