"""Sends chats to any OpenAI-compatible endpoint."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from judge_service.scorers.grading import TOP_LOGPROBS, Messages
from services.domain.errors import DeadlineExceeded, Overloaded, Unavailable

DEFAULT_RETRY_S = 1.0
RETRY_RANGE_S = (0.1, 60.0)


class OpenAiChat:
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
        self._url, self._model, self._api_key = f"{endpoint.rstrip('/')}/chat/completions", model, api_key
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._max_tokens, self._extra_body = max_tokens, dict(extra_body or {})

    async def start(self) -> None:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=headers)

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, messages: Messages) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            **self._extra_body,
        }
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status == 429:
                    raise Overloaded(f"{self._url} is full", retry_after_s(response.headers.get("Retry-After")))
                if response.status != 200:
                    raise Unavailable(f"{self._url} answered {response.status}")  # its text may quote the prompt
                choice: dict[str, Any] = (await response.json())["choices"][0]
                return choice
        except TimeoutError:
            raise DeadlineExceeded(f"{self._url} gave no grade within {self._timeout.total:g} s") from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url}: {error!r}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._url}: unexpected response: {error!r}") from error


def retry_after_s(header: str | None) -> float:
    """The delay in a Retry-After header; 1 s if it is missing or invalid."""
    least, most = RETRY_RANGE_S
    try:
        return min(most, max(least, float(header or DEFAULT_RETRY_S)))
    except ValueError:
        return DEFAULT_RETRY_S
