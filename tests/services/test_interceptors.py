"""What every gRPC server of ours answers to calls that no handler should ever see."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.router_service import proto_codec
from penstock.services import errors
from penstock.services.access.guard import CallGuard
from penstock.services.access.roles import Listener
from penstock.services.domain.errors import InvalidRequest, NotFound, PenstockError
from penstock.services.grpc_types import Context
from penstock.services.health import Health
from penstock.services.interceptors import ChassisInterceptor
from penstock.types.problems import FieldProblem
from tests.support.telemetry_off import telemetry_off

GENERATE = "/penstock.router.v1.RouterService/Generate"
LIST_MODELS = "/penstock.router.v1.RouterService/ListModels"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Checking(router_pb2_grpc.RouterServiceServicer):
    """Checks requests as the router does; each is for a model that nobody has."""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802 -- as in the contract
        asked = proto_codec.request_from_proto(request, "r", 0.0, lambda _: None)
        if asked.model != "served":
            raise NotFound("model", asked.model)
        yield pb.GenerateResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802 -- as in the contract
        return pb.ListModelsResponse()


class Unguarded(CallGuard):
    """Lets every call pass."""

    def check(self, method: str, context: Context) -> None:
        pass


@pytest.fixture
async def channel() -> AsyncIterator[aio.Channel]:
    guard = Unguarded(Listener.CLIENT, certificates=False)
    server = aio.server(interceptors=(ChassisInterceptor(telemetry_off(), write_timeout_s=60.0, guard=guard),))
    router_pb2_grpc.add_RouterServiceServicer_to_server(Checking(), server)
    Health(server, "test").offer(pb.DESCRIPTOR.services_by_name["RouterService"].full_name)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as made:
        yield made
    await server.stop(0)


async def failure(channel: aio.Channel, method: str, *messages: bytes) -> aio.AioRpcError:
    """The error that a method answers a message, or none, with."""
    with pytest.raises(aio.AioRpcError) as caught:
        await _call(channel, method, *messages)
    return caught.value


async def _call(channel: aio.Channel, method: str, *messages: bytes) -> None:
    """A message goes as a unary call: where a refusal arrives before a stream's message is sent, its client says INTERNAL."""
    if messages:
        unary: Any = channel.unary_unary(method)
        await unary(*messages, timeout=60)
        return
    stream: Any = channel.stream_stream(method)
    call = stream(timeout=60)
    await call.done_writing()
    await call.read()


def fields(error: aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    bad = error_details_pb2.BadRequest()
    return [v.field for detail in status.details if detail.Unpack(bad) for v in bad.field_violations]


@pytest.mark.parametrize(
    ("method", "data"),
    [
        (method, data)
        for method in (GENERATE, LIST_MODELS, HEALTH, REFLECTION)
        for data in (b"\xff\xff\xff", b"\x0a\xff")
    ]
    + [(GENERATE, b"\x0a\x01\xff"), (HEALTH, b"\x0a\x01\xff")],
)
async def test_bytes_that_are_no_message_are_an_invalid_request(channel: aio.Channel, method: str, data: bytes) -> None:
    """Garbage, a field longer than the message, and a string that is not UTF-8."""
    error = await failure(channel, method, data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == ["request"]


@pytest.mark.parametrize("method", [GENERATE, LIST_MODELS, HEALTH])
async def test_a_call_without_a_message_is_refused_at_once(channel: aio.Channel, method: str) -> None:
    """It is not left to wait for its deadline, nor for ever without one."""
    error = await failure(channel, method)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == ["request"]


async def test_an_unknown_method_is_unimplemented(channel: aio.Channel) -> None:
    for method in ("/penstock.router.v1.RouterService/Nothing", "/a/b", "/", "none", f"/{'x' * 4000}/y"):
        assert (await failure(channel, method, b"")).code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["x" * 5_000, "é" * 5_000, "x" * 250, "é" * 250, "\U0001f600" * 250, "\x00" * 250])
async def test_a_long_model_name_is_refused_in_a_small_message(channel: aio.Channel, name: str) -> None:
    request = pb.GenerateRequest(model=name, prompt=common_pb2.Prompt(text="hello"))
    error = await failure(channel, GENERATE, request.SerializeToString())
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert len(error.details() or "") < 200


async def test_a_report_of_thousands_of_faults_still_arrives(channel: aio.Channel) -> None:
    """Trailers are limited to 8 KiB by the peer: a larger report would arrive as RESOURCE_EXHAUSTED."""
    message = common_pb2.ChatMessage(role="\U0001f600" * 100)
    request = pb.GenerateRequest(
        model="m", prompt=common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=[message] * 4000))
    )
    error = await failure(channel, GENERATE, request.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt.chat.messages[0].role" in fields(error)
    assert "prompt.chat.messages[0].role" in (error.details() or "")


@pytest.mark.parametrize("text", ["a\nb", "\x00", "\x1b[31m", "\ud800", "\u2028", "\n" * 500, "x" * 500, "\x00" * 79])
def test_what_is_echoed_stays_on_its_line(text: str) -> None:
    """A log has a line for each error: nobody can write lines of their own into it, nor colours into a terminal."""
    for error in (NotFound("model", text), InvalidRequest(FieldProblem(text, text))):
        assert str(error).isprintable()
        assert len(str(error)) < 700
    assert len(str(NotFound("model", text))) < 100


def test_a_report_names_sixteen_faults_and_counts_the_rest() -> None:
    error = InvalidRequest(*(FieldProblem(f"messages[{i}].role", "must be one of these") for i in range(8_000)))
    assert len(error.problems) == 16
    assert str(error).endswith("; and 7984 more")
    assert len(str(error)) < 4_096


@pytest.mark.parametrize("text", ["x", "é", "\U0001f600", "\ud800", "\x00", "%"])
@pytest.mark.parametrize("kind", [InvalidRequest, NotFound, PenstockError])
def test_a_status_is_small_whatever_the_error_says(text: str, kind: type[PenstockError]) -> None:
    """Percent-encoded, and in base64, a status has to fit 8 KiB of trailers."""
    huge = text * 100_000
    error: PenstockError = PenstockError(huge)
    if kind is InvalidRequest:
        error = InvalidRequest(*(FieldProblem(huge, huge) for _ in range(100)))
    elif kind is NotFound:
        error = NotFound("model", huge)
    status = errors.to_proto(error)
    assert status.ByteSize() <= errors.MAX_STATUS_BYTES
    percent_encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in status.message.encode())
    assert percent_encoded + 4 * (status.ByteSize() + 2) / 3 < 8_000
    back = errors.from_proto(status)
    if isinstance(back, InvalidRequest):
        assert back.problems
        assert all(problem.field for problem in back.problems)
