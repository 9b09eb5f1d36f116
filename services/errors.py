"""Maps exceptions to gRPC statuses and HTTP codes, and gRPC statuses back to exceptions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from penstock.mapper import duration
from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InstanceDraining,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NotFound,
    NotServed,
    Overloaded,
    PeerNotReading,
    PenstockError,
    PermissionDenied,
    PoisonRequest,
    PromptTooLong,
    RequestFailed,
    RevisionConflict,
    SloDeclined,
    Unauthenticated,
    Unavailable,
    UnsupportedByModel,
)
from penstock.status_details import details_of
from penstock.types.problems import FieldProblem

DOMAIN = "penstock"

# A status is sent in trailers, which peers limit to 8 KiB in total: its message percent-encoded (up to three bytes per byte),
# and the whole status in base64 (four bytes for three). 1 KiB and 3 KiB make at most 7 KiB.
MAX_MESSAGE_BYTES = 1024
MAX_STATUS_BYTES = 3072

# error -> (gRPC code, HTTP status)
TABLE: dict[type[PenstockError], tuple[grpc.StatusCode, int]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    NotFound: (grpc.StatusCode.NOT_FOUND, 404),
    AlreadyRunning: (grpc.StatusCode.ALREADY_EXISTS, 409),
    RevisionConflict: (grpc.StatusCode.ABORTED, 409),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    SloDeclined: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, 503),
    DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    NotServed: (grpc.StatusCode.UNIMPLEMENTED, 501),
    RequestFailed: (grpc.StatusCode.FAILED_PRECONDITION, 422),
    PoisonRequest: (grpc.StatusCode.FAILED_PRECONDITION, 422),
    MessageTooLarge: (grpc.StatusCode.INVALID_ARGUMENT, 413),
    PeerNotReading: (grpc.StatusCode.UNAVAILABLE, 503),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, 401),
    PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, 403),
}

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _row(error: PenstockError) -> tuple[grpc.StatusCode, int]:
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), (grpc.StatusCode.INTERNAL, 500))


def grpc_code(error: PenstockError) -> grpc.StatusCode:
    return _row(error)[0]


def http_status(error: PenstockError) -> int:
    return _row(error)[1]


def to_proto(error: PenstockError) -> status_pb2.Status:
    """The status of an error with ErrorInfo, and BadRequest or RetryInfo if they apply; at most MAX_STATUS_BYTES."""
    code: int = grpc_code(error).value[0]
    status = status_pb2.Status(code=code_pb2.Code.ValueType(code), message=message_of(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if isinstance(error, Overloaded):
        delay = duration(max(1, round(error.retry_after_s * 1000)) / 1000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidRequest):
        status.details.add().Pack(_violations(error, MAX_STATUS_BYTES - status.ByteSize()))
    return status


def message_of(error: PenstockError, limit_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """The message of `error` as valid UTF-8 of at most `limit_bytes`."""
    message = str(error).encode("utf-8", "replace")
    if len(message) <= limit_bytes:
        return message.decode()
    return message[: limit_bytes - 3].decode("utf-8", "ignore") + "\u2026"  # the ellipsis has three bytes


def _violations(error: InvalidRequest, limit_bytes: int) -> error_details_pb2.BadRequest:
    """As many problems of the error as fit into `limit_bytes`, including the overhead of packing."""
    bad = error_details_pb2.BadRequest()
    size = 64  # type name, tags and lengths
    for problem in error.problems:
        violation = error_details_pb2.BadRequest.FieldViolation(field=problem.field, description=problem.problem)
        size += violation.ByteSize() + 4
        if size > limit_bytes:
            break
        bad.field_violations.append(violation)
    return bad


def to_status(error: PenstockError) -> grpc.Status:
    """Like `to_proto`, for the context of a server."""
    return rpc_status.to_status(to_proto(error))


def from_rpc(failed: aio.AioRpcError) -> PenstockError:
    """The exception for a failed call to another service; Unavailable if no row of the table matches."""
    error: Any = failed
    status = rpc_status.from_call(error)
    if status is None:
        number: int = failed.code().value[0]
        status = status_pb2.Status(code=code_pb2.Code.ValueType(number), message=failed.details() or "")
    return from_proto(status)


@contextmanager
def of_calls() -> Iterator[None]:
    """Calls in this context raise the exception that `from_rpc` makes of their failure."""
    try:
        yield
    except aio.AioRpcError as error:
        raise from_rpc(error) from error


def is_ours(failed: aio.AioRpcError) -> bool:
    """Whether the error was sent by a Penstock service; otherwise it comes from the gRPC library or the network."""
    error: Any = failed
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return False
    return status is not None and details_of(status).reason != ""


def from_proto(status: status_pb2.Status) -> PenstockError:
    """Like `from_rpc`, from the status."""
    code, message = _CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message
    details = details_of(status)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            kind = _INVALID.get(details.reason, InvalidRequest)
            return kind(*(details.problems or [FieldProblem("request", message)]))
        case _ if details.reason in _BY_REASON:
            return _BY_REASON[details.reason](message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if details.reason != Overloaded.reason:  # from the gRPC library
            return MessageTooLarge(FieldProblem("request", message))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(
                message.partition(";")[0], 1.0 if details.retry_after_s is None else details.retry_after_s
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the deadline has passed")
        case grpc.StatusCode.ALREADY_EXISTS:
            return AlreadyRunning(message)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound("entry", message)
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotServed(message)
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return InternalError(f"{code.name}: {message}")
    return Unavailable(f"{code.name}: {message}")


_INVALID = {kind.reason: kind for kind in (PromptTooLong, MessageTooLarge, UnsupportedByModel)}
_BY_REASON = {kind.reason: kind for kind in (RequestFailed, InstanceDraining, InternalError)}
