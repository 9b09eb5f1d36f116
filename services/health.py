"""gRPC health (grpc.health.v1) and reflection, the same for every service.

Names to query: "" is the server as a whole; `package.Service` one of its services (the router's is SERVING while it should
get requests, like /readyz); the instance id this process (another process at the same address responds with NOT_FOUND); and
`penstock.state` the connection to Redis.
"""

from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STATE_LINK = "penstock.state"


class Health:
    """Health of the server, of each of its services, and of its connection to Redis."""

    def __init__(self, server: aio.Server, instance_id: str, *, admin: aio.Server | None = None) -> None:
        """admin: the server of the administrative listener: health is served there, too, and reflection only there."""
        self._servicer = health.aio.HealthServicer()
        self._names = ["", instance_id]
        for each in (server, admin) if admin is not None else (server,):
            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, each)
        self._server = admin or server

    def offer(self, *services: str) -> None:
        """Add services, by full name, to reflection and health."""
        self._names += services
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def set_serving(self, serving: bool) -> None:
        for name in self._names:
            await self._servicer.set(name, SERVING if serving else NOT_SERVING)

    async def set_ready(self, service: str, ready: bool) -> None:
        """Set whether one service should get requests. After the first call, `set_serving` no longer changes it."""
        if service in self._names:
            self._names.remove(service)
        await self._servicer.set(service, SERVING if ready else NOT_SERVING)

    async def set_state_link(self, connected: bool) -> None:
        """Set whether Redis is reachable. The server keeps serving without it, so no other name changes."""
        await self._servicer.set(STATE_LINK, SERVING if connected else NOT_SERVING)

    async def enter_graceful_shutdown(self) -> None:
        """Report NOT_SERVING from now on, regardless of later calls."""
        await self._servicer.enter_graceful_shutdown()


async def is_serving(
    channel: aio.Channel, instance_id: str, timeout_s: float, *, wait_for_ready: bool = False
) -> bool | None:
    """Whether the process at the other end of a channel is this instance and serving; None without a response in time.

    wait_for_ready: try to connect until then, not once.
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        request = health_pb2.HealthCheckRequest(service=instance_id)
        response = await stub.Check(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except aio.AioRpcError as error:
        return False if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED) else None
    return bool(response.status == SERVING)
