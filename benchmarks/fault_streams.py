"""Streams that are checked token by token while processes of their mesh are killed or stopped."""

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.spread import percentile
from penstock import AsyncClient, Escalated, Finished, InstanceChanged, MeshStatus, PenstockError, Tokens
from penstock.local.mesh import LocalMesh

RECOVERY_TIMEOUT_S = 120.0
SSE_TRIES = 8  # like OpenAI clients, this one retries
SSE_PAUSE_S = 0.5


@dataclass(slots=True)
class StreamResult:
    """What a client saw of one request.

    token_times_s: when tokens came, on the monotonic clock.
    error: why the reply is incomplete.
    asked_again: times that a client without resumption (SSE) sent the request again after it had received tokens.
    """

    prompt: str
    text: str = ""
    tier: str = ""
    tokens: int = 0
    doubled: bool = False
    asked_again: int = 0
    failovers: int = 0
    judge_missing: bool = False
    error: str = ""
    token_times_s: list[float] = field(default_factory=list)

    def longest_gap_s(self, since_s: float) -> float | None:
        """The longest wait for a token that ended after `since_s`; None for a stream that was not active then."""
        if not self.token_times_s or not self.token_times_s[0] < since_s <= self.token_times_s[-1]:
            return None
        pairs = zip(self.token_times_s, self.token_times_s[1:], strict=False)
        return max((after - before for before, after in pairs if after >= since_s), default=0.0)


Stream = Callable[[str, StreamResult], Coroutine[Any, Any, None]]  # asks the prompt and fills in the result


def grpc_stream(client: AsyncClient, **options: Any) -> Stream:
    """Through the SDK, which resumes at another router."""

    async def run(prompt: str, result: StreamResult) -> None:
        try:
            async for event in client.stream(prompt, temperature=0, **options):
                match event:
                    case Tokens():
                        result.doubled |= event.offset != result.tokens
                        result.tokens += len(event.token_ids)
                        result.text += event.text
                        if event.token_ids:
                            result.token_times_s.append(time.monotonic())
                    case InstanceChanged():
                        result.failovers += 1
                    case Escalated(reason="judge_unavailable"):
                        result.judge_missing = True
                    case Finished():
                        result.tier = event.tier
        except PenstockError as error:
            result.error = f"{type(error).__name__}: {error}"

    return run


def sse_stream(session: aiohttp.ClientSession, urls: Sequence[str], first: int, body: Mapping[str, Any]) -> Stream:
    """Through the OpenAI API. When a router dies, the complete request is sent to the next one."""

    async def attempt(url: str, prompt: str, result: StreamResult) -> None:
        request = {"messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0, **body}
        done = False
        async with session.post(f"{url}/v1/chat/completions", json=request) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise aiohttp.ClientPayloadError(chunk["error"]["message"])
                    if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                        result.text += chunk["choices"][0]["delta"]["content"]
                        result.token_times_s.append(time.monotonic())
                    extension = chunk.get("penstock") or {}
                    result.tier = extension.get("tier", result.tier)
        if not done:
            raise aiohttp.ClientPayloadError("the stream ended without [DONE]")

    async def run(prompt: str, result: StreamResult) -> None:
        for number in range(SSE_TRIES):
            result.text, result.error = "", ""
            try:
                await attempt(urls[(first + number) % len(urls)], prompt, result)
                break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                result.error = f"{type(error).__name__}: {error}"
                result.asked_again += bool(result.text)
                await asyncio.sleep(SSE_PAUSE_S)

    return run


def signal_process(mesh: LocalMesh, name: str, number: signal.Signals) -> None:
    """Send a signal to a process of the mesh by its name.

    Raises:
        RuntimeError: It is not running.
    """
    pid = mesh.watcher.watched[name].pid
    if pid is None:
        raise RuntimeError(f"{name} is not running")
    os.kill(pid, number)


def process_of(mesh: LocalMesh, instance_id: str) -> str:
    """The name of the process of an instance; empty if it is not a current process of this mesh."""
    pid = instance_id.rpartition("-")[2]
    return next((name for name, entry in mesh.watcher.watched.items() if str(entry.pid) == pid), "")


def is_whole(mesh: LocalMesh, status: MeshStatus) -> bool:
    """Whether every process is running, known to the router, and ready."""
    ready = {i.instance_id.rpartition("-")[2] for i in status.instances if i.age_s < 2.5 and i.state == "ready"}
    return status.connected and ready == {str(w.pid) for name, w in mesh.watcher.watched.items() if name != "redis"}


async def until_whole(mesh: LocalMesh) -> float:
    """Seconds until every router sees every process ready.

    Raises:
        TimeoutError: It took longer than RECOVERY_TIMEOUT_S.
    """
    began = time.monotonic()
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while True:
            try:
                addresses = mesh.addresses.admin
                statuses = await asyncio.gather(*(_status(address) for address in addresses))
                routers = sum(1 for name in mesh.watcher.watched if name.startswith("router"))
                if len(statuses) == routers and all(is_whole(mesh, status) for status in statuses):
                    return time.monotonic() - began
            except PenstockError:
                pass  # the router is not ready yet
            await asyncio.sleep(0.1)


async def _status(admin: str) -> MeshStatus:
    async with AsyncClient(admin, admin=admin) as client:
        return await client.status()


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def percentile_ms(values: Sequence[float], percent: float) -> float | None:
    """The percentile in milliseconds of values in seconds; None without values."""
    value_s = percentile(values, percent)
    return None if value_s is None else round(1000 * value_s, 1)


def summary(
    results: Sequence[StreamResult], expected: Callable[[StreamResult], str | None], since_s: float
) -> dict[str, Any]:
    """Counts and stalls of streams. expected: the correct text of a stream; None: any."""
    pairs = [(result, expected(result)) for result in results if not result.error]
    gaps = [gap for result in results if (gap := result.longest_gap_s(since_s)) is not None]
    return {
        "streams": len(results),
        "lost": sum(1 for result in results if result.error),
        "doubled": sum(result.doubled for result in results),
        "wrong": sum(1 for result, text in pairs if text is not None and text != result.text),
        "asked_again": sum(result.asked_again > 0 for result in results),
        "failovers": sum(result.failovers for result in results),
        "under_way": len(gaps),
        "stall_p50_ms": percentile_ms(gaps, 50),
        "stall_p99_ms": percentile_ms(gaps, 99),
        "stall_mean_ms": round(1000 * statistics.fmean(gaps), 1) if gaps else None,
        "errors": sorted({result.error[:160] for result in results if result.error})[:5],
    }
