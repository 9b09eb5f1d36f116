"""Sends chats to any OpenAI-compatible endpoint."""

from collections.abc import Mapping
from typing import Any

from penstock.judge_service.clients.endpoint import Endpoint
from penstock.judge_service.scoring.questions import TOP_LOGPROBS, Messages


class OpenAiChat(Endpoint):
    """Any OpenAI-compatible endpoint.

    endpoint: base URL, including `/v1`. max_tokens: of a reply, thoughts included. extra_body: further fields of requests.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        api_key: str | None,
        timeout_s: float,
        max_tokens: int,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{endpoint.rstrip('/')}/chat/completions", api_key=api_key, timeout_s=timeout_s)
        self._body = {
            "model": model,
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            **(extra_body or {}),
        }

    async def ask(self, messages: Messages) -> dict[str, Any]:
        return await self.post(self._body | {"messages": messages}, lambda reply: dict(reply["choices"][0]))
