"""The server of an engine: started by it or running already, watched, and restarted where it is its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.services.domain.errors import Unavailable
from penstock.services.processes import free_port
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.sglang import attach
from penstock.worker_service.engine.sglang.client import CALL_TIMEOUT_S, ServerInfo, ServerLoad, SglangClient
from penstock.worker_service.engine.sglang.extension import slo_shape_problems
from penstock.worker_service.engine.sglang.launch import ServerShape
from penstock.worker_service.engine.sglang.server import ServerProcess

_log = logging.getLogger(__name__)

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class SglangEngineOptions:
    """folder: the model, for its tokenizer and config. model: as in the tier of the mesh file.

    max_requests: limit on concurrent requests. endpoint: a running server. launch: a server to start at `port` (0: any free
    port). Exactly one of the two is set. adapter: the folder of a LoRA adapter that all requests use. gone_s: a running
    server that does not respond for this long has failed. hold: limits of output coalescing. keeps_slos: requests are
    admitted with an SLO where a prediction of the server's steps, measured at the start, says that it can be kept.
    tightest_tpot_s: an own server whose steps with a full chunk take longer than this pace is started once more with smaller
    chunks.
    """

    folder: Path
    name: str
    endpoint: str = ""
    launch: ServerShape | None = None
    adapter: Path | None = None
    port: int = 0
    max_requests: int = 128
    max_context_tokens: int | None = None
    start_timeout_s: float = 600.0
    gone_s: float = 10.0
    hold: OutputCoalescing | None = None
    tool_format: str = "auto"
    model: str = ""
    keeps_slos: bool = False
    tightest_tpot_s: float | None = None


class Silence:
    """How long a server has not responded while this process ran. Times in seconds.

    A failed poll counts for no more than it can take: the rest of it, this process was suspended.
    """

    def __init__(self, now: float) -> None:
        self.broken(now)

    def broken(self, now: float) -> None:
        self._polled_at, self._silent_s = now, 0.0

    def go_on(self, now: float) -> float:
        """A poll failed; returns the length of the silence so far."""
        self._silent_s += min(now - self._polled_at, POLL_S + CALL_TIMEOUT_S)
        self._polled_at = now
        return self._silent_s


class ServerLink:
    """client, info: of the server, once it has started. up: whether requests can be sent to it now. process: an own one's."""

    client: SglangClient
    info: ServerInfo

    def __init__(self, options: SglangEngineOptions) -> None:
        self._options = options
        self.up, self._turned = False, asyncio.Condition()
        self.process: ServerProcess | None = None

    async def start(self, shape: ServerShape | None) -> None:
        """Start a server of this shape, or attach to one without it, and wait until it is healthy.

        Raises:
            EngineUnusable: It does not start, does not respond in time, is not one for this model or adapter, or has several
                batches where SLOs are kept.
        """
        options = self._options
        if shape is not None:
            self.process = ServerProcess(shape, options.port or free_port())
            await self.process.start()
        endpoint = self.process.endpoint if self.process is not None else options.endpoint
        self.client = SglangClient(endpoint)
        try:
            async with asyncio.timeout(options.start_timeout_s):
                await self._until_healthy()
            self.info = await self.client.info()
            if problems := [*await asyncio.to_thread(self._problems)]:
                raise EngineUnusable(f"the SGLang server at {endpoint}: {'; '.join(problems)}")
            if options.adapter is not None:
                self.client.adapter = await asyncio.to_thread(attach.adapter_name, self.info.adapters, options.adapter)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise EngineUnusable(f"no SGLang server at {endpoint} after {options.start_timeout_s:g} s") from None
            raise

    def _problems(self) -> list[str]:
        """Why the engine cannot use the server: its version, another model, or several batches where SLOs are predicted."""
        options, problems = self._options, list[str]()
        if options.endpoint:
            problems += attach.problems(self.info.response, options.folder, (options.model, options.name))
        if options.keeps_slos:
            shape = slo_shape_problems(self.info.dp, self.info.attn_dp)
            problems += [f"batch_policy slo needs {name} 1, {problem}" for name, problem in shape]
        return problems

    async def _until_healthy(self) -> None:
        while not await self.client.healthy():
            if self.process is not None and self.process.lost:
                raise EngineUnusable("the SGLang server ends whenever it is started; see its log above")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        await self.client.close()
        if self.process is not None:
            await self.process.stop()

    async def availability(self) -> AsyncIterator[bool]:
        """As in `Interruptible`: False while the server restarts."""
        while True:
            yield (available := self.up)
            async with self._turned:
                while self.up is available:
                    await self._turned.wait()

    async def turn(self, *, up: bool) -> None:
        async with self._turned:
            self.up = up
            self._turned.notify_all()

    async def watch(self, observe: Callable[[ServerLoad], Awaitable[None]]) -> None:
        """Poll the load of the server. One that has died or is silent for `gone_s` is restarted.

        Raises:
            Unavailable: An external server is gone.
            EngineUnusable: An own one cannot be restarted.
        """
        loop, restarts = asyncio.get_running_loop(), 0
        silence = Silence(loop.time())
        while True:
            try:
                await observe(await self.client.load())
                silence.broken(loop.time())
            except Unavailable as error:
                silent = silence.go_on(loop.time()) > self._options.gone_s
                if self.process is None and silent:
                    raise
                if self.process is not None and (
                    silent or self.process.pid is None or self.process.restarts > restarts
                ):
                    _log.warning("the SGLang server is down: %s", error)
                    await self.turn(up=False)
                    if silent:
                        self.process.kill()
                    await self._until_healthy()
                    restarts = self.process.restarts
                    silence.broken(loop.time())
                    await self.turn(up=True)
            await asyncio.sleep(POLL_S)
