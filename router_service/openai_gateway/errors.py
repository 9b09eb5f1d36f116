"""Errors in OpenAI's shape."""

import math
from typing import Any

from aiohttp import web

from penstock.router_service.openai_gateway.field_names import renamed
from penstock.services.domain.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PenstockError,
    RateLimited,
    SloDeclined,
    UnsupportedByModel,
)
from penstock.services.errors import http_status, message_of
from penstock.types.problems import shortened

MAX_MESSAGE_BYTES = 4096

_TYPES = dict.fromkeys((400, 404, 409, 413, 422), "invalid_request_error") | {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def error_body(error: PenstockError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; `param` names the first field at fault."""
    param = None
    if isinstance(error, InvalidRequest):
        error = renamed(error) if type(error) in (InvalidRequest, UnsupportedByModel) else error
        param = error.problems[0].field if error.problems else None
    elif isinstance(error, NotFound) and error.kind == "model":
        param = "model"
    code = "model_not_found" if param == "model" and isinstance(error, NotFound) else error.reason.lower()
    kind = _TYPES.get(http_status(error), "server_error")
    return {"error": {"message": message_of(error, MAX_MESSAGE_BYTES), "type": kind, "param": param, "code": code}}


def error_headers(error: PenstockError) -> dict[str, str]:
    """Retry-After if there is a time to name, and the limits of a tenant that has used one up; for a declined request, the
    header that keeps OpenAI's clients from retrying: each retry would begin with a new time to first token."""
    if isinstance(error, SloDeclined):
        return {"x-should-retry": "false"}
    headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, Overloaded) else {}
    return headers | error.headers if isinstance(error, RateLimited) else headers


def plain_error(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """What HTTP itself refuses: the path, the method, the body's size or type, what is expected."""
    param = _PARAMS.get(error.status)
    message = (
        f"{request.method} {shortened(request.path)}: {error.reason}" if param is None else f"{param}: {error.text}"
    )
    code = error.reason.lower().replace(" ", "_")
    allowed = {key: value for key, value in error.headers.items() if key == "Allow"}
    body = plain_error(message, "invalid_request_error", code, param)
    response = web.json_response(body, status=error.status, headers=allowed)
    if isinstance(error, web.HTTPRequestTimeout):
        response.force_close()  # the rest of the body may still be coming
    return response


_PARAMS = {408: "body", 413: "body", 415: "body", 417: "expect"}
