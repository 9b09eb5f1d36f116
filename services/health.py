"""gRPC health (grpc.health.v1) and reflection, the same for every service."""

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Health of the server as a whole and of each of its services."""

    def __init__(self, server: aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = [""]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self._server = server

    def offer(self, *services: str) -> None:
        """Serve reflection for the server's services, by full name, and answer for their health."""
        self._names += services
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def set_serving(self, serving: bool) -> None:
        for name in self._names:
            await self._servicer.set(name, SERVING if serving else NOT_SERVING)

    async def enter_graceful_shutdown(self) -> None:
        """NOT_SERVING from now on, whatever is set later."""
        await self._servicer.enter_graceful_shutdown()
