"""POST /v1/responses, without storage: what agents of the official SDKs send."""

from penstock.router_service.openai_gateway.responses.events import ResponseFormat, StreamedResponse
from penstock.router_service.openai_gateway.responses.schema import ResponseRequest

__all__ = ["ResponseFormat", "ResponseRequest", "StreamedResponse"]
