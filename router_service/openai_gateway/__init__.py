"""The OpenAI-compatible HTTP API of the router."""

from penstock.router_service.openai_gateway.app import OpenAiGateway

__all__ = ["OpenAiGateway"]
