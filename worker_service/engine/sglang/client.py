"""SGLang's native HTTP API, as far as we use it (seen with 0.5.23)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import aiohttp

from services import telemetry
from services.domain.errors import Overloaded, Unavailable, invalid

CALL_TIMEOUT_S = 5.0
IDLE_S = 4.0  # how long the server may take to come to rest; below the time that any call may take
END_S = 0.1  # a stream's end comes with its last token, or not at all

# (token, logprob), likeliest first.
Likeliest = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself.

    input_tokens: the longest prompt it takes. kv_tokens: room in its KV cache, all its replicas together.
    step_tokens: of prompts, in one step.
    grammars: it can keep a reply's form.
    seeded: a sampled token depends on seed and position only. priorities: waiting requests go by priority.
    """

    input_tokens: int
    kv_tokens: int
    page_tokens: int
    step_tokens: int
    max_running: int
    tp: int
    pp: int
    seeded: bool
    priorities: bool
    prefix_cache: bool
    metrics: bool
    grammars: bool = True


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Tokens of KV in use by requests and in all, requests computed and waiting; the most that are computed together."""

    used_tokens: int
    capacity_tokens: int
    max_running: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brought: new tokens, their logprobs as (logprob, likeliest).

    finish: stop, length or abort, with the last piece. cached_tokens: prompt tokens that were not computed; stored_tokens:
    those of them that came from a shared store.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, Likeliest]]
    finish: str | None
    cached_tokens: int = 0
    stored_tokens: int = 0
    retractions: int = 0


class SglangClient:
    """Speaks to one server."""

    def __init__(self, endpoint: str) -> None:
        self._base = endpoint.rstrip("/")
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),  # how many requests run at once is the engine's to decide
        )

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
        try:
            return ServerInfo(
                input_tokens=int(data["max_req_input_len"]),
                kv_tokens=load.capacity_tokens,
                page_tokens=int(data.get("page_size") or 1),
                step_tokens=int(data.get("chunked_prefill_size") or load.capacity_tokens),
                max_running=int(data.get("max_running_requests") or load.max_running),
                tp=int(data["tp_size"]),
                pp=int(data["pp_size"]),
                seeded=bool(data.get("enable_deterministic_inference")),
                priorities=bool(data.get("enable_priority_scheduling"))
                and not data.get("schedule_low_priority_values_first"),
                prefix_cache=not data.get("disable_radix_cache"),
                metrics=bool(data.get("enable_metrics")),
                grammars=data.get("grammar_backend") != "none",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._base}/server_info: unexpected answer: {error!r}") from error

    async def load(self) -> ServerLoad:
        """Unavailable if the server does not answer, or not as expected."""
        data = await self._get("v1/loads?include=core")
        try:
            ranks = data["loads"]
            return ServerLoad(
                used_tokens=sum(r["num_used_tokens"] for r in ranks),
                capacity_tokens=sum(r["max_total_num_tokens"] for r in ranks),
                max_running=sum(r["max_running_requests"] for r in ranks),
                running=sum(r["num_running_reqs"] for r in ranks),
                waiting=sum(r["num_waiting_reqs"] for r in ranks),
            )
        except (KeyError, TypeError) as error:
            raise Unavailable(f"{self._base}/v1/loads: unexpected answer: {error!r}") from error

    async def cached_tokens(self) -> int:
        """Tokens of ended requests whose KV is still there; the server must have its metrics on. Unavailable."""
        try:
            async with self._session.get(f"{self._base}/metrics", timeout=_BRIEF) as response:
                if response.status != 200:
                    raise Unavailable(f"{self._base}/metrics answered {response.status}")
                lines = (await response.text()).splitlines()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self._base}/metrics: {error!r}") from error
        return round(
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sglang:kv_evictable_tok"))
        )

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, once nothing runs: a request that has just ended takes the server a moment. Unavailable."""
        await self._post(f"flush_cache?timeout={IDLE_S:g}", {})

    async def abort(self, request_id: str) -> None:
        """Unavailable if the server does not answer."""
        await self._post("abort_request", {"rid": request_id})

    async def generate(
        self,
        request_id: str,
        token_ids: Seq[int],
        sampling: dict[str, Any],
        *,
        top_logprobs: int | None = None,
        priority: int | None = None,
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
        if priority is not None:
            body["priority"] = priority
        seen = 0
        headers = dict(telemetry.inject())
        try:
            async with self._session.post(f"{self._base}/generate", json=body, headers=headers) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                async for data in _events(response.content):
                    if "error" in data:
                        raise _refusal(int(data["error"].get("code", 500)), str(data["error"].get("message")))
                    piece = _piece(data, seen)
                    seen += len(piece.token_ids)
                    if piece.finish is None:
                        yield piece
                        continue
                    await _to_the_end(response)
                    yield piece
                    return  # the rest may have been given up
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self._base}: {error!r}") from error

    async def likeliest(
        self, request_id: str, prefix: Seq[int], draft: Seq[int], top: int, priority: int | None = None
    ) -> list[Likeliest]:
        """The `top` likeliest tokens at every position of `draft` behind `prefix`, and at the one behind both.

        One forward pass over what the prefix cache does not hold. InvalidRequest, Overloaded, Unavailable.
        """
        body: dict[str, Any] = {
            "rid": request_id,
            "input_ids": [*prefix, *draft],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": len(prefix) - 1,
            "top_logprobs_num": top,
        }
        if priority is not None:
            body["priority"] = priority
        meta = await self._generate_whole(body)
        try:
            rows = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
        except (KeyError, TypeError) as error:
            raise Unavailable(f"{self._base}/generate: unexpected answer: {error!r}") from error
        if len(rows) != len(draft) + 1 or not all(rows):
            raise Unavailable(f"{self._base}/generate: logprobs at {len(rows)} positions, not {len(draft) + 1}")
        return [_likeliest(row) for row in rows]

    async def prompt_seconds(self, request_id: str, token_ids: Seq[int]) -> float:
        """Seconds of the server's forward pass over a prompt, by its own clock. InvalidRequest, Overloaded, Unavailable."""
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        meta = await self._generate_whole({"rid": request_id, "input_ids": token_ids, "sampling_params": sampling})
        try:
            return float(meta["prefill_finished_time"]) - float(meta["forward_entry_time"])
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._base}/generate: unexpected answer: {error!r}") from error

    async def _generate_whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the server says of a reply that is not streamed."""
        headers = dict(telemetry.inject())
        try:
            async with self._session.post(f"{self._base}/generate", json=body, headers=headers) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                meta: dict[str, Any] = (await response.json())["meta_info"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise Unavailable(f"{self._base}: {error!r}") from error
        _refuse_aborted(meta)
        return meta

    async def _get(self, path: str) -> Any:
        try:
            async with self._session.get(f"{self._base}/{path}", timeout=_BRIEF) as response:
                if response.status != 200:
                    raise Unavailable(f"{self._base}/{path} answered {response.status}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self._base}/{path}: {error!r}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            async with self._session.post(f"{self._base}/{path}", json=body, timeout=_BRIEF) as response:
                if response.status != 200:
                    raise Unavailable(f"{self._base}/{path} answered {response.status}")
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self._base}/{path}: {error!r}") from error


_BRIEF = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events, however long: with all logprobs so far in each, one can be many kilobytes."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def _to_the_end(response: aiohttp.ClientResponse) -> None:
    """Read what ends a stream, so that the next request finds its connection open."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(END_S):
            await response.read()


def _likeliest(row: Seq[Seq[Any]]) -> Likeliest:
    return [(token, value) for value, token, *_ in row]


def _piece(data: dict[str, Any], seen: int) -> Piece:
    """One event. `output_ids` holds all tokens so far, or (--incremental-streaming-output) the new ones: either way the
    new ones are its last."""
    meta = data["meta_info"]
    new = meta["completion_tokens"] - seen
    finish = meta.get("finish_reason")
    if finish is not None and new <= 0:
        _refuse_aborted(meta)
    ids = data["output_ids"][-new:] if new > 0 else []
    chosen = (meta.get("output_token_logprobs") or [])[-new:] if new > 0 else []
    tops = (meta.get("output_top_logprobs") or [])[-new:] if new > 0 else []
    logprobs = [(entry[0], _likeliest(tops[i]) if i < len(tops) and tops[i] else []) for i, entry in enumerate(chosen)]
    return Piece(
        ids,
        logprobs,
        finish["type"] if finish else None,
        meta.get("cached_tokens") or 0,
        (meta.get("cached_tokens_details") or {}).get("storage") or 0,
        meta.get("num_retractions") or 0,
    )


def _refuse_aborted(meta: dict[str, Any]) -> None:
    """Raise what ended a request that the server, and not its caller, has aborted."""
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort" and finish.get("status_code"):
        raise _refusal(int(finish["status_code"]), str(finish.get("message")))


def _refusal(status: int, said: str) -> Exception:
    if status == 400:
        return invalid("request", f"the SGLang server refuses it: {said[:300]}")
    if status in (429, 503):
        return Overloaded(f"the SGLang server is full: {said[:300]}", 1.0)
    return Unavailable(f"the SGLang server answered {status}: {said[:300]}")
