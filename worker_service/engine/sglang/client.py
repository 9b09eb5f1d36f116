"""A client of SGLang's native HTTP API (tested with 0.5.23)."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from penstock.services import telemetry
from penstock.services.domain.errors import Overloaded, Unavailable, invalid

CALL_TIMEOUT_S = 5.0
IDLE_S = 4.0  # limit on waiting for the server to become idle; less than the time-out of calls
END_S = 0.1  # the end of a stream arrives with its last token, or never

# (token, logprob), most likely first.
TopTokens = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a server.

    response: all of it. input_tokens: largest length of a prompt. kv_tokens: KV capacity of all replicas.
    step_tokens: limit on prompt tokens in one step; with attn_dp, of each of its groups. adapters: the folders of the LoRA
    adapters that it was started with, by name. grammars: whether it enforces the form of a reply.
    seeded: sampled tokens depend only on seed and position. priorities: waiting requests are ordered by priority.
    """

    response: dict[str, Any]
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
    dp: int = 1
    ep: int = 1
    attn_dp: int = 1
    adapters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """KV tokens used by requests and in total, running and waiting requests, and the limit on running requests."""

    used_tokens: int
    capacity_tokens: int
    max_running: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event of a stream: new tokens and their logprobs as (logprob, most likely).

    finish: stop, length or abort, in the last piece. cached_tokens: prompt tokens that were not computed. stored_tokens:
    those of them that were loaded from a shared store.
    """

    token_ids: list[int]
    logprobs: list[tuple[float, TopTokens]]
    finish: str | None
    cached_tokens: int = 0
    stored_tokens: int = 0
    retractions: int = 0


def greedy(tokens: int) -> dict[str, Any]:
    """The sampling parameters of a greedy reply with exactly so many tokens."""
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def server_id(request_id: str) -> str:
    """A new id for one call of a request to a server.

    A server refuses an id for a while after its request has ended, so a retry needs another one. It aborts all requests whose
    ids begin with a given one, so none may begin with another: they differ within a first part of constant length.
    """
    return f"{uuid.uuid4().hex}:{request_id}"


class SglangClient:
    """A client of one server. Its request ids are the server's: see `server_id`."""

    def __init__(self, endpoint: str) -> None:
        self._base = endpoint.rstrip("/")
        self.adapter = ""
        """The server's name of the LoRA adapter that all requests use; empty: none."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),  # the engine limits concurrent requests
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        """Whether the server responds and has loaded its model."""
        with contextlib.suppress(Unavailable):
            await self._call("health")
            return True
        return False

    async def info(self) -> ServerInfo:
        """Raises:
        Unavailable: The server does not respond, or with an unexpected response.
        """
        answer, load = await self._call("server_info"), await self.load()
        try:
            data = json.loads(answer)
            dp, attn_dp = int(data.get("dp_size") or 1), int(data.get("attn_dp_size") or 1)
            if data.get("enable_dp_attention") and attn_dp == 1:
                dp, attn_dp = 1, dp  # older servers count the groups of attention in dp_size
            return ServerInfo(
                response=data,
                input_tokens=int(data["max_req_input_len"]),
                kv_tokens=load.capacity_tokens,
                page_tokens=int(data.get("page_size") or 1),
                step_tokens=int(data.get("chunked_prefill_size") or load.capacity_tokens),
                max_running=int(data.get("max_running_requests") or load.max_running),
                tp=int(data["tp_size"]),
                pp=int(data["pp_size"]),
                dp=dp,
                ep=int(data.get("ep_size") or 1),
                attn_dp=attn_dp,
                seeded=bool(data.get("enable_deterministic_inference")),
                priorities=bool(data.get("enable_priority_scheduling"))
                and not data.get("schedule_low_priority_values_first"),
                # each copy of the model or of its attention has a cache of its own; the server decides which gets a request
                prefix_cache=not data.get("disable_radix_cache") and dp * attn_dp == 1,
                metrics=bool(data.get("enable_metrics")),
                adapters={entry["lora_name"]: entry["lora_path"] for entry in data.get("lora_paths") or ()},
                grammars=data.get("grammar_backend") != "none" and not data.get("skip_tokenizer_init"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._base}/server_info: unexpected response: {error!r}") from error

    async def load(self) -> ServerLoad:
        """Raises:
        Unavailable: The server does not respond, or with an unexpected response.
        """
        answer = await self._call("v1/loads?include=core")
        try:
            ranks = json.loads(answer)["loads"]
            return ServerLoad(
                used_tokens=sum(r["num_used_tokens"] for r in ranks),
                capacity_tokens=sum(r["max_total_num_tokens"] for r in ranks),
                max_running=sum(r["max_running_requests"] for r in ranks),
                running=sum(r["num_running_reqs"] for r in ranks),
                waiting=sum(r["num_waiting_reqs"] for r in ranks),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._base}/v1/loads: unexpected response: {error!r}") from error

    async def cached_tokens(self) -> int:
        """Cached tokens of finished requests. The metrics of the server must be enabled.

        Raises:
            Unavailable: The server does not respond.
        """
        lines = (await self._call("metrics")).splitlines()
        cached = [line.rpartition(" ")[2] for line in lines if line.startswith("sglang:kv_evictable_tok")]
        return round(sum(map(float, cached)))

    async def forget_prefixes(self) -> None:
        """Flush the prefix cache when the server is idle, shortly after the last request has ended.

        Raises:
            Unavailable: The server does not respond or does not become idle.
        """
        await self._call(f"flush_cache?timeout={IDLE_S:g}", {})

    async def abort(self, request_id: str) -> None:
        """Raises:
        Unavailable: The server does not respond.
        """
        await self._call("abort_request", {"rid": request_id})

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        top_logprobs: int | None = None,
        priority: int | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces as they arrive. A server with tracing joins the trace of the caller.

        Raises:
            InvalidRequest: The server refuses the request.
            Overloaded: The server is full.
            Unavailable: The server does not respond.
        """
        body = self._body(request_id, token_ids, sampling) | {"stream": True}
        if top_logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs, "logprob_start_len": -1}
        if priority is not None:
            body["priority"] = priority
        if cache_salt:
            body["extra_key"] = cache_salt  # the part of the prefix tree that the request uses
        received = 0
        async with self._generating(body) as response:
            async for data in _events(response.content):
                if "error" in data:
                    raise _refusal(int(data["error"].get("code", 500)), str(data["error"].get("message")))
                piece = _piece(data, received)
                received += len(piece.token_ids)
                if piece.finish is None:
                    yield piece
                    continue
                await _drain(response)
                yield piece
                return  # the caller may have left the iteration

    async def prompt_seconds(self, request_id: str, token_ids: Sequence[int]) -> float:
        """Seconds of the server's forward pass over a prompt, by the server's clock.

        Raises:
            InvalidRequest: The server refuses the request.
            Overloaded: The server is full.
            Unavailable: The server does not respond.
        """
        async with self._generating(self._body(request_id, token_ids, greedy(1))) as response:
            meta: dict[str, Any] = (await response.json()).get("meta_info") or {}
        _refuse_aborted(meta)
        try:
            return float(meta["prefill_finished_time"]) - float(meta["forward_entry_time"])
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._base}/generate: unexpected response: {error!r}") from error

    def _body(self, request_id: str, token_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"rid": request_id, "input_ids": token_ids, "sampling_params": sampling}
        if self.adapter:
            body["lora_path"] = self.adapter
        return body

    @contextlib.asynccontextmanager
    async def _generating(self, body: dict[str, Any]) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """The response to a generation that the server has taken, which joins the trace of the caller."""
        headers = dict(telemetry.inject())
        try:
            async with self._session.post(f"{self._base}/generate", json=body, headers=headers) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                yield response
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self._base}: {error!r}") from error

    async def _call(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The response to a brief call; with a body it is posted."""
        method, url = "GET" if body is None else "POST", f"{self._base}/{path}"
        try:
            async with self._session.request(method, url, json=body, timeout=_BRIEF) as response:
                if response.status != 200:
                    raise Unavailable(f"{url} answered {response.status}")
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{url}: {error!r}") from error


_BRIEF = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of any length: with all logprobs so far, one can have many kilobytes."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a stream, so that its connection can be reused."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(END_S):
            await response.read()


def _top_tokens(row: Sequence[Sequence[Any]]) -> TopTokens:
    return [(token, value) for value, token, *_ in row]


def _piece(data: dict[str, Any], previous: int) -> Piece:
    """The piece of one event. `output_ids` has all tokens so far or, with --incremental-streaming-output, the new ones. In
    both cases the new ones are the last."""
    meta = data["meta_info"]
    new = meta["completion_tokens"] - previous
    finish = meta.get("finish_reason")
    # a form that it cannot compile has a token
    if finish is not None and (new <= 0 or finish.get("status_code") == 400):
        _refuse_aborted(meta)
    ids = data["output_ids"][-new:] if new > 0 else []
    chosen = (meta.get("output_token_logprobs") or [])[-new:] if new > 0 else []
    tops = (meta.get("output_top_logprobs") or [])[-new:] if new > 0 else []
    logprobs = [(entry[0], _top_tokens(tops[i]) if i < len(tops) and tops[i] else []) for i, entry in enumerate(chosen)]
    cached, retractions = meta.get("cached_tokens") or 0, meta.get("num_retractions") or 0
    stored = (meta.get("cached_tokens_details") or {}).get("storage") or 0
    return Piece(ids, logprobs, finish["type"] if finish else None, cached, stored, retractions)


def _refuse_aborted(meta: dict[str, Any]) -> None:
    """Raise the error of a request that was aborted by the server, not by its caller."""
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort" and finish.get("status_code"):
        raise _refusal(int(finish["status_code"]), str(finish.get("message")))


def _refusal(status: int, message: str) -> Exception:
    if status == 400:
        return invalid("request", f"the SGLang server refused the request: {message[:300]}")
    if status in (429, 503):
        return Overloaded(f"the SGLang server is full: {message[:300]}", 1.0)
    return Unavailable(f"the SGLang server answered {status}: {message[:300]}")
