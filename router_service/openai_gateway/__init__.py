"""The OpenAI-compatible HTTP face of the router."""

from router_service.openai_gateway.app import OpenAiGateway

__all__ = ["OpenAiGateway"]
