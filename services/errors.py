"""The one table from our errors to gRPC statuses and HTTP codes, and back again for our own clients."""

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    FieldProblem,
    InvalidRequest,
    NotFound,
    NotServed,
    Overloaded,
    PeerNotReading,
    PenstockError,
    PromptTooLong,
    RevisionConflict,
    Unavailable,
)

DOMAIN = "penstock"

# error -> (gRPC code, HTTP status)
TABLE: dict[type[PenstockError], tuple[grpc.StatusCode, int]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    NotFound: (grpc.StatusCode.NOT_FOUND, 404),
    AlreadyRunning: (grpc.StatusCode.ALREADY_EXISTS, 409),
    RevisionConflict: (grpc.StatusCode.ABORTED, 409),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    NotServed: (grpc.StatusCode.UNIMPLEMENTED, 501),
    PeerNotReading: (grpc.StatusCode.UNAVAILABLE, 503),
}

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _row(error: PenstockError) -> tuple[grpc.StatusCode, int]:
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    return grpc.StatusCode.INTERNAL, 500


def grpc_code(error: PenstockError) -> grpc.StatusCode:
    return _row(error)[0]


def http_status(error: PenstockError) -> int:
    return _row(error)[1]


def to_proto(error: PenstockError) -> status_pb2.Status:
    """A status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[any_pb2.Any] = [_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))]
    if isinstance(error, InvalidRequest):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=p.field, description=p.problem) for p in error.problems
        ]
        details.append(_packed(error_details_pb2.BadRequest(field_violations=violations)))
    if isinstance(error, Overloaded):
        delay = Duration()
        delay.FromMilliseconds(max(1, round(error.retry_after_s * 1000)))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: int = grpc_code(error).value[0]
    message = str(error).encode("utf-8", "replace").decode()
    return status_pb2.Status(code=code_pb2.Code.ValueType(code), message=message, details=details)


def to_status(error: PenstockError) -> grpc.Status:
    """As `to_proto`, for a server's context."""
    return rpc_status.to_status(to_proto(error))


def from_rpc(failed: aio.AioRpcError) -> PenstockError:
    """The error that another service of ours meant, from status and details. Unavailable for what no table row says."""
    said: Any = failed
    status = rpc_status.from_call(said)
    if status is None:
        number: int = failed.code().value[0]
        status = status_pb2.Status(code=code_pb2.Code.ValueType(number), message=failed.details() or "")
    return from_proto(status)


def from_proto(status: status_pb2.Status) -> PenstockError:
    """As `from_rpc`, from the status alone."""
    code, said = _CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message
    reason, problems, retry_after_s = _details(status)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT if reason == PromptTooLong.reason:
            return PromptTooLong(*problems)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(*(problems or [FieldProblem("request", said)]))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(said.partition(";")[0], retry_after_s)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the deadline passed")
        case grpc.StatusCode.ALREADY_EXISTS:
            return AlreadyRunning(said)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound("entry", said)
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotServed(said)
        case _:
            return Unavailable(f"{code.name}: {said}")


def _details(status: status_pb2.Status) -> tuple[str, list[FieldProblem], float]:
    """(reason, problems by field, seconds to wait)."""
    reason, problems, retry_after_s = "", list[FieldProblem](), 1.0
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad):
            problems += [FieldProblem(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return reason, problems, retry_after_s


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
