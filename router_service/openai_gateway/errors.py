"""Errors in OpenAI's shape."""

import math
from typing import Any

from router_service.openai_gateway.schema import renamed
from services.domain.errors import InvalidRequest, NotFound, Overloaded, PenstockError
from services.errors import http_status

_TYPES = dict.fromkeys((400, 404, 409, 413, 422), "invalid_request_error") | {429: "rate_limit_error"}


def error_body(error: PenstockError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; `param` names the first field at fault."""
    param = None
    if isinstance(error, InvalidRequest):
        error = renamed(error) if type(error) is InvalidRequest else error
        param = error.problems[0].field if error.problems else None
    elif isinstance(error, NotFound) and error.kind == "model":
        param = "model"
    code = "model_not_found" if param == "model" and isinstance(error, NotFound) else error.reason.lower()
    kind = _TYPES.get(http_status(error), "server_error")
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_headers(error: PenstockError) -> dict[str, str]:
    """Retry-After where there is a time to name."""
    return {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, Overloaded) else {}


def plain_error(message: str, kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
