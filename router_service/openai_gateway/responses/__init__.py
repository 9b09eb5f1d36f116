"""POST /v1/responses, without storage: what agents of the official SDKs send."""

from router_service.openai_gateway.responses.events import ResponseFormat, StreamedResponse
from router_service.openai_gateway.responses.schema import ResponseRequest, parse_response

__all__ = ["ResponseFormat", "ResponseRequest", "StreamedResponse", "parse_response"]
