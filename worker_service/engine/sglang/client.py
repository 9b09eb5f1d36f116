"""SGLang's native HTTP API, as far as we use it (seen with 0.5.23)."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp

from services import telemetry
from services.domain.errors import Overloaded, Unavailable, invalid

CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """context_tokens: None where the server follows the model's config."""

    context_tokens: int | None
    kv_tokens: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class ServerLoad:
    used_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brought: new tokens, their logprobs as (logprob, [(token, logprob), ...]).

    cached_tokens: prompt tokens that were not computed; stored_tokens: those of them that came from a shared store.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]]
    finish: str | None  # stop, length or abort
    cached_tokens: int = 0
    stored_tokens: int = 0
    retractions: int = 0


class SglangClient:
    """Speaks to one server."""

    def __init__(self, endpoint: str) -> None:
        self._base = endpoint.rstrip("/")
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CALL_TIMEOUT_S))

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        """Whether the server answers and has its model loaded."""
        try:
            async with self._session.get(f"{self._base}/health", timeout=_BRIEF) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def info(self) -> ServerInfo:
        """Unavailable if the server does not answer, or not as expected."""
        data = await self._get("server_info")
        load = await self.load()
        return ServerInfo(data.get("context_length"), load.capacity_tokens, int(data.get("page_size") or 1))

    async def load(self) -> ServerLoad:
        """Unavailable if the server does not answer, or not as expected."""
        data = await self._get("v1/loads")
        try:
            ranks = data["loads"]
            return ServerLoad(sum(r["num_used_tokens"] for r in ranks), sum(r["max_total_num_tokens"] for r in ranks))
        except (KeyError, TypeError) as error:
            raise Unavailable(f"{self._base}/v1/loads: unexpected answer: {error!r}") from error

    async def abort(self, request_id: str) -> None:
        """Unavailable if the server does not answer."""
        try:
            async with self._session.post(
                f"{self._base}/abort_request", json={"rid": request_id}, timeout=_BRIEF
            ) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self._base}: {error!r}") from error

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: dict[str, Any], top_logprobs: int | None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces as they come; a server that traces joins the caller's trace. InvalidRequest, Overloaded, Unavailable."""
        body: dict[str, Any] = {
            "rid": request_id,
            "input_ids": token_ids,
            "sampling_params": sampling,
            "stream": True,
        }
        if top_logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs, "logprob_start_len": -1}
        seen = 0
        try:
            headers = dict(telemetry.inject())
            async with self._session.post(f"{self._base}/generate", json=body, headers=headers) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    data = json.loads(line[6:])
                    if "error" in data:
                        raise _refusal(int(data["error"].get("code", 500)), str(data["error"].get("message")))
                    piece = _piece(data, seen)
                    seen += len(piece.token_ids)
                    yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self._base}: {error!r}") from error

    async def _get(self, path: str) -> Any:
        try:
            async with self._session.get(f"{self._base}/{path}", timeout=_BRIEF) as response:
                if response.status != 200:
                    raise Unavailable(f"{self._base}/{path} answered {response.status}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self._base}/{path}: {error!r}") from error


_BRIEF = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)


def _piece(data: dict[str, Any], seen: int) -> Piece:
    """One event. `output_ids` holds all tokens so far, or (--incremental-streaming-output) the new ones: either way the
    new ones are its last."""
    meta = data["meta_info"]
    new = meta["completion_tokens"] - seen
    ids = data["output_ids"][-new:] if new > 0 else []
    chosen = (meta.get("output_token_logprobs") or [])[-new:] if new > 0 else []
    tops = (meta.get("output_top_logprobs") or [])[-new:] if new > 0 else []
    logprobs = [
        (entry[0], [(token, value) for value, token, _ in (tops[i] if i < len(tops) and tops[i] else [])])
        for i, entry in enumerate(chosen)
    ]
    finish = meta.get("finish_reason")
    return Piece(
        ids,
        logprobs,
        finish["type"] if finish else None,
        meta.get("cached_tokens") or 0,
        (meta.get("cached_tokens_details") or {}).get("storage") or 0,
        meta.get("num_retractions") or 0,
    )


def _refusal(status: int, said: str) -> Exception:
    if status == 400:
        return invalid("request", f"the SGLang server refuses it: {said[:300]}")
    if status in (429, 503):
        return Overloaded(f"the SGLang server is full: {said[:300]}", 1.0)
    return Unavailable(f"the SGLang server answered {status}: {said[:300]}")
