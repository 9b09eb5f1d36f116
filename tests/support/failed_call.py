"""A call of gRPC that has failed, without a server."""

from typing import Any

import grpc


class FailedCall(grpc.RpcError, grpc.Call):
    """A call that ended with a status, as both kinds of client raise it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self._code, self._details, self._trailing_metadata = code, details, trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing_metadata

    def initial_metadata(self) -> Any: ...
    def is_active(self) -> Any: ...
    def time_remaining(self) -> Any: ...
    def cancel(self) -> Any: ...
    def add_callback(self, callback: Any) -> Any: ...
