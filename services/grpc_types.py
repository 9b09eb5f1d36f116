"""Types of grpc that are generic only for the type checker."""

from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

if TYPE_CHECKING:
    Context = aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Context = aio.ServicerContext
    Handler = grpc.RpcMethodHandler

__all__ = ["Context", "Handler"]
