"""Routers that fail in ways that a real one cannot be brought to: one follows a script, one breaks connections by hand."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.services import errors
from penstock.services.domain.errors import PenstockError
from penstock.services.grpc_types import Context

TEXT = "abcdefgh"

Step = Callable[[pb.GenerateRequest, Context], AsyncIterator[pb.GenerateResponse]]


def accepted(heartbeat_s: float | None = None) -> pb.GenerateResponse:
    made = pb.GenerateResponse(accepted=pb.Accepted(request_id="r", plan_revision=1, seed=7))
    if heartbeat_s is not None:
        made.accepted.heartbeat_interval.CopyFrom(duration(heartbeat_s))
    return made


def duration(value_s: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(value_s * 1e9))
    return made


def token(offset: int) -> pb.GenerateResponse:
    frame = common_pb2.TokenFrame(offset=offset, token_ids=[offset], text=TEXT[offset])
    return pb.GenerateResponse(tokens=pb.AnswerTokens(tier="t", frame=frame))


async def answer(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
    """Answer `TEXT`, a token for each character, or what `resume` leaves of it."""
    yield accepted()
    for offset in range(len(request.resume.token_ids), len(TEXT)):
        yield token(offset)
    yield pb.GenerateResponse(finished=pb.Finished(tier="t", reason=common_pb2.FINISH_REASON_STOP))


def failing(error: PenstockError | grpc.StatusCode, *, tokens: int | None = None) -> Step:
    """A step that fails; after `accepted` and so many tokens, where that is given."""

    async def step(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        if tokens is not None:
            yield accepted()
            begun = len(request.resume.token_ids)
            for offset in range(begun, begun + tokens):
                yield token(offset)
        if isinstance(error, PenstockError):
            await context.abort_with_status(errors.to_status(error))
        else:
            await context.abort(error, "scripted")

    return step


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Serves each call by the next step of a script; the last step is repeated."""

    def __init__(self, *script: Step) -> None:
        self._script = list(script)
        self.address = ""
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = asyncio.Event()
        """Set once a call has been cancelled by the client."""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        step = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        try:
            async for response in step(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter while an event was being written
            self.cancelled.set()
            raise

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse()


class StuckMesh(router_pb2_grpc.MeshServiceServicer):
    """Gives one status, then nothing."""

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        yield pb.WatchStatusResponse(status=pb.MeshStatus(router_id="stuck"))
        await asyncio.Event().wait()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=pb.MeshStatus(router_id="stuck"))

    async def ListTraces(self, request: pb.ListTracesRequest, context: Context) -> pb.ListTracesResponse:
        return pb.ListTracesResponse()

    async def MoveReply(self, request: pb.MoveReplyRequest, context: Context) -> pb.MoveReplyResponse:
        return pb.MoveReplyResponse(refusal="stuck")


@asynccontextmanager
async def scripted(*script: Step) -> AsyncIterator[ScriptedRouter]:
    """A router that follows a script, as long as the context lasts."""
    router = ScriptedRouter(*script)
    server = aio.server(options=(("grpc.http2.min_ping_interval_without_data_ms", 10),))
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    router_pb2_grpc.add_MeshServiceServicer_to_server(StuckMesh(), server)  # type: ignore[abstract]
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield router
    finally:
        await server.stop(0)


def http2_frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


SETTINGS, GOAWAY, RST_STREAM, HEADERS = 4, 7, 3, 1


def reset_stream(code: int) -> Callable[[int], bytes]:
    return lambda stream: http2_frame(RST_STREAM, stream, struct.pack(">I", code))


def go_away(stream: int) -> bytes:
    """The connection takes no streams after this one."""
    return http2_frame(GOAWAY, 0, struct.pack(">II", stream, 0))


@asynccontextmanager
async def breaking(reply: Callable[[int], bytes], *, close: bool) -> AsyncIterator[str]:
    """The address of a server that speaks enough HTTP/2 to answer each request's headers with `reply(stream)`.

    close: it closes the connection after that.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(24)  # the preface
            writer.write(http2_frame(SETTINGS, 0))
            while True:
                head = await reader.readexactly(9)
                length, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
                await reader.readexactly(length)
                if kind == SETTINGS and not flags & 1:
                    writer.write(http2_frame(SETTINGS, 0, flags=1))
                if kind == HEADERS:
                    writer.write(reply(stream))
                    if close:
                        await writer.drain()
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
