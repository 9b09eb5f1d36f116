"""The exceptions of the clients."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from penstock.status_details import StatusDetails, details_of


class PenstockError(Exception):
    """A call failed. `code`: the gRPC status code. `reason`: the machine-readable reason from the server."""

    def __init__(self, message: str, *, code: grpc.StatusCode, reason: str = "") -> None:
        self.code, self.reason = code, reason
        super().__init__(message)


class InvalidRequestError(PenstockError):
    """The request is invalid. `fields`: the problems by field."""

    def __init__(self, message: str, fields: Mapping[str, str], reason: str = "") -> None:
        self.fields = dict(fields)
        super().__init__(message, code=grpc.StatusCode.INVALID_ARGUMENT, reason=reason)


class NotFoundError(PenstockError):
    """The model, plan revision or trace does not exist."""


class OverloadedError(PenstockError):
    """The mesh is overloaded. `retry_after_s`: when to retry; 0 if the server did not say."""

    def __init__(self, message: str, retry_after_s: float, reason: str = "") -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason=reason)


class UnavailableError(PenstockError):
    """No server could be reached, or none could serve the request."""


class DeadlineError(PenstockError):
    """The deadline has passed."""


class ConflictError(PenstockError):
    """The expected plan revision is not the current one, or a request with this id is already running."""


class AuthenticationError(PenstockError):
    """The API key is missing, wrong, expired or revoked."""


class PermissionDeniedError(PenstockError):
    """The caller may not do this."""


class RequestFailedError(PenstockError):
    """The request fails on every instance; it is not retried."""


MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""`reason` of a message that exceeds the size limit of the client or the router."""

_BY_CODE: dict[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.ABORTED: ConflictError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: RequestFailedError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}


def silent(limit_s: float) -> PenstockError:
    """The exception for a stream on which the router sent nothing for `limit_s`, not even a heartbeat."""
    return UnavailableError(f"the router was silent for {limit_s:g} s", code=grpc.StatusCode.UNAVAILABLE)


def no_admin_listener() -> PenstockError:
    """The exception for an administrative call of a client that was given no administrative listener."""
    return PenstockError(
        "admin: the client needs the address of the routers' administrative listener for this call",
        code=grpc.StatusCode.FAILED_PRECONDITION,
    )


def client_closed() -> PenstockError:
    """The exception for a request whose client was closed."""
    return PenstockError("the client is closed", code=grpc.StatusCode.CANCELLED)


def from_rpc(failed: grpc.RpcError) -> PenstockError:
    """The exception for a failed call, from its status and details."""
    error: Any = failed  # the errors of both gRPC APIs are calls; their types do not show it
    code, message = error.code(), error.details() or ""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the details belong to another status
        status = None
    details = details_of(status) if status is not None else StatusDetails()
    reason = details.reason
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(message, {each.field: each.problem for each in details.problems}, reason)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason and "message larger than max" in message:
        return PenstockError(message, code=code, reason=MESSAGE_TOO_LARGE)  # gRPC gives no other sign of it
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OverloadedError(message, details.retry_after_s or 0.0, reason)
    kind = _BY_CODE.get(code, PenstockError)
    return kind(message or code.name, code=code, reason=reason)


@contextmanager
def raised_from_rpc() -> Iterator[None]:
    """Raise a failed call inside the context, of the blocking or the asyncio API, as a PenstockError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error) from error
