"""Headers of every response: the request's id, and what browsers need to call the API from other origins (CORS)."""

from collections.abc import Sequence

from aiohttp import web
from multidict import CIMultiDict

from penstock.router_service.generation.in_flight_requests import new_request_id

REQUEST_ID = web.RequestKey("request_id", str)
"""Key of a request's id, which is in its response's `x-request-id`, in the reply's own id, and in traces."""
ANY_ORIGIN = "*"
MAX_PREFLIGHT_HEADERS = 1024
"""Characters of the list of headers that a preflight request names; browsers list a few."""
MAX_AGE_S = 7200
"""For how long a browser may keep the answer of a preflight request; Chromium's own limit."""
_LIMITS = [f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")]
_EXPOSED = ", ".join(["x-request-id", "retry-after", "x-should-retry", *_LIMITS])


def begin(request: web.Request) -> None:
    """Give a request its id."""
    request[REQUEST_ID] = new_request_id()


class ResponseHeaders:
    """origins: those whose pages may call the API; `*`: all; none: no CORS headers are sent."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add them to a response that is about to be sent."""
        if (request_id := request.get(REQUEST_ID)) is not None:
            response.headers["x-request-id"] = request_id
        if self._origins:
            self._allow(request, response.headers)
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def preflight(self, request: web.Request) -> web.Response | None:
        """The response to a browser that asks before it sends a request; None for any other request.

        Keys are not asked for: browsers send none with this request.
        """
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or not self._origins:
            return None
        headers = CIMultiDict({"Access-Control-Max-Age": str(MAX_AGE_S)})
        headers["Access-Control-Allow-Methods"] = "GET, POST"
        names = request.headers.get("Access-Control-Request-Headers", "")
        if len(names) <= MAX_PREFLIGHT_HEADERS:
            headers["Access-Control-Allow-Headers"] = names or "authorization, content-type"
        return web.Response(status=204, headers=headers)

    def _allow(self, request: web.Request, headers: "CIMultiDict[str]") -> None:
        origin = request.headers.get("Origin")
        if ANY_ORIGIN in self._origins:
            headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
        else:
            headers["Vary"] = "Origin"
            if origin in self._origins:
                headers["Access-Control-Allow-Origin"] = origin
