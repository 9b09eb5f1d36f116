"""/livez, /readyz and /health of the HTTP server: plain answers for load balancers and orchestrators, outside all traces."""

from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web

from penstock.router_service.routing.readiness import Readiness

PATHS = ("/livez", "/readyz", "/health")
NOT_READY = 503


def add_health_routes(app: web.Application, read: Callable[[], Readiness]) -> None:
    """read: tells the readiness at the time of the request."""

    async def livez(_: web.Request) -> web.Response:
        """The process is alive: 200 for as long as it answers at all, draining or not."""
        return web.json_response({"status": "alive"})

    async def readyz(_: web.Request) -> web.Response:
        """Whether it should be sent requests, and the state of each tier."""
        state = read()
        body = {"status": state.problem or "ready", **asdict(state)}
        return web.json_response(body, status=NOT_READY if state.problem else 200)

    async def health(_: web.Request) -> web.Response:
        """200 once there is a plan and while the router does not drain, whatever its tiers do."""
        state = read()
        ok = state.plan_revision > 0 and not state.draining
        body = {"status": "ok" if ok else state.problem, "state_connected": state.state_connected}
        return web.json_response(body, status=200 if ok else NOT_READY)

    for path, handler in zip(PATHS, (livez, readyz, health), strict=True):
        app.router.add_get(path, handler)
