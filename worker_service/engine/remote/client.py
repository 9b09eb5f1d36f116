"""Calls of the endpoints of a remote tier: streamed chat completions, with failover until the first event."""

import contextlib
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp

from penstock.services.domain.errors import Overloaded, PenstockError, PromptTooLong, Unavailable, UnsupportedByModel
from penstock.services.retry_after import retry_after_s
from penstock.types.problems import FieldProblem, shortened

_log = logging.getLogger(__name__)

CONNECT_S = 10.0
EJECTION_S = 5.0
"""For how long an endpoint that failed is tried after all others."""
MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Of one line of a stream; more is no chat completion."""
MAX_ERROR_BYTES = 64 * 1024
MAX_MESSAGE_CHARS = 300
_REFUSED = (400, 404, 413, 415, 422)
_TOO_LONG = ("context_length_exceeded", "prompt_too_long")


class RemoteClient:
    """The endpoints, which serve the same model. key: sent to all of them; empty: none."""

    def __init__(self, endpoints: Sequence[str], key: str, silence_s: float) -> None:
        """endpoints: base URLs, with /v1. silence_s: a stream that is silent for so long has failed."""
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._ejected_until = dict.fromkeys(self._endpoints, 0.0)
        self._turn = itertools.count()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s),
            connector=aiohttp.TCPConnector(limit=0),  # the engine limits concurrent requests
        )

    async def close(self) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The models of the first endpoint that answers; those of an endpoint without a list are unknown: none.

        Raises:
            Unavailable: No endpoint answers, or none takes the key.
        """
        problem = ""
        for endpoint in self._endpoints:
            try:
                async with self._session.get(f"{endpoint}/models") as response:
                    if response.status == 404:
                        return []
                    if response.status == 200:
                        return [str(model["id"]) for model in (await response.json())["data"]]
                    problem = f"{endpoint}/models answered {response.status}"
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                problem = f"{endpoint}: {error!r}"
        raise Unavailable(problem)

    async def open(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Begin a streamed chat completion at the first endpoint that takes it. The caller closes the response.

        Raises:
            PromptTooLong: The prompt exceeds the model's context.
            UnsupportedByModel: The endpoint refuses the request.
            Overloaded: All endpoints are full, or limit the rate.
            Unavailable: No endpoint answers.
        """
        problems: list[PenstockError] = []
        for endpoint in self._order():
            try:
                response = await self._session.post(f"{endpoint}/chat/completions", json=body)
            except (aiohttp.ClientError, TimeoutError) as error:
                problems.append(Unavailable(f"{endpoint}: {type(error).__name__}"))
                self._eject(endpoint, problems[-1])
                continue
            if response.status == 200:
                return response
            refusal = await _refusal(endpoint, response)
            if isinstance(refusal, (PromptTooLong, UnsupportedByModel)):
                raise refusal
            problems.append(refusal)
            self._eject(endpoint, refusal)
        full = [problem for problem in problems if isinstance(problem, Overloaded)]
        raise min(full, key=lambda each: each.retry_after_s) if len(full) == len(problems) else problems[-1]

    def _order(self) -> Iterator[str]:
        """All endpoints, beginning with the next one in turn; ejected ones last."""
        first, now = next(self._turn) % len(self._endpoints), time.monotonic()
        rotated = [*self._endpoints[first:], *self._endpoints[:first]]
        yield from sorted(rotated, key=lambda endpoint: self._ejected_until[endpoint] > now)

    def _eject(self, endpoint: str, error: PenstockError) -> None:
        self._ejected_until[endpoint] = time.monotonic() + EJECTION_S
        _log.warning("endpoint ejected for %g s: %s", EJECTION_S, error)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, up to its end mark.

    Raises:
        Unavailable: The connection broke, the stream was silent for too long, or is none of chat completions.
    """
    rest = b""
    try:
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_EVENT_BYTES:
                raise Unavailable(f"{response.url.origin()}: an event of more than {MAX_EVENT_BYTES} bytes")
            for line in lines:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield _event(data, response)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"{response.url.origin()}: {type(error).__name__}") from error


def _event(data: bytes, response: aiohttp.ClientResponse) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        event = json.loads(data)
        if isinstance(event, dict):
            if (error := event.get("error")) is not None:
                message = error.get("message") if isinstance(error, dict) else error
                raise Unavailable(f"{response.url.origin()}: {shortened(str(message), MAX_MESSAGE_CHARS)}")
            return event
    raise Unavailable(f"{response.url.origin()}: an event that is no JSON object")


async def _refusal(endpoint: str, response: aiohttp.ClientResponse) -> PenstockError:
    """The error of a response; closes it."""
    status, code, message = response.status, "", ""
    try:
        with contextlib.suppress(ValueError, TypeError, AttributeError, aiohttp.ClientError, TimeoutError):
            content = json.loads(await response.content.read(MAX_ERROR_BYTES))
            details = content.get("error", content)
            code, message = str(details.get("code")), shortened(str(details.get("message")), MAX_MESSAGE_CHARS)
    finally:
        response.close()
    problem = f"the endpoint answered {status}: {message}" if message else f"the endpoint answered {status}"
    if status in _REFUSED:
        field = FieldProblem("request", problem)
        return PromptTooLong(field) if code in _TOO_LONG else UnsupportedByModel(field)
    if status == 429:
        return Overloaded(f"{endpoint}: {problem}", retry_after_s(response.headers))
    return Unavailable(f"{endpoint}: {problem}")
