"""/livez, /readyz and /health of the HTTP server: plain answers for load balancers and orchestrators, outside all traces."""

from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web

from penstock.router_service.routing.readiness import Readiness

PATHS = ("/livez", "/readyz", "/health")
NOT_READY = 503


class HealthRoutes:
    """`read` tells the readiness at the time of the request."""

    def __init__(self, read: Callable[[], Readiness]) -> None:
        self._read = read

    def add_to(self, app: web.Application) -> None:
        for path, handler in zip(PATHS, (self._livez, self._readyz, self._health), strict=True):
            app.router.add_get(path, handler)

    async def _livez(self, request: web.Request) -> web.Response:
        """The process is alive: 200 for as long as it answers at all, draining or not."""
        return web.json_response({"status": "alive"})

    async def _readyz(self, request: web.Request) -> web.Response:
        """Whether it should be sent requests, and the state of each tier."""
        state = self._read()
        body = {"status": state.problem or "ready", **asdict(state)}
        return web.json_response(body, status=NOT_READY if state.problem else 200)

    async def _health(self, request: web.Request) -> web.Response:
        """200 once there is a plan and while the router does not drain, whatever its tiers do."""
        state = self._read()
        ok = state.plan_revision > 0 and not state.draining
        body = {"status": "ok" if ok else state.problem, "state_connected": state.state_connected}
        return web.json_response(body, status=200 if ok else NOT_READY)
