"""The OpenAI-compatible HTTP API of the router."""

from router_service.openai_gateway.app import HttpLimits, OpenAiGateway

__all__ = ["HttpLimits", "OpenAiGateway"]
