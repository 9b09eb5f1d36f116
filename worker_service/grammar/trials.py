"""Has grammars tried in a process with limits before this one compiles them; see `trial_process`."""

import asyncio
import base64
import contextlib
import itertools
import json
import sys
from collections import OrderedDict
from collections.abc import Callable

from penstock.services.background import end, supervise
from penstock.services.domain.errors import Unavailable, invalid
from penstock.worker_service.grammar.fair_turns import FairTurns
from penstock.worker_service.grammar.source import GrammarSource

MAX_KNOWN = 4096
"""Grammars whose results are kept, by their texts' hashes; the longest unused is forgotten first."""

MAX_TRIALS = 4
"""Trials at once, of all callers."""

MAX_WAITING = 512
"""Requests that wait for a trial; further ones are refused."""

REFUSED_REST_S = 0.1
"""Time between a refusal and the next one of the same caller: who asks in a loop for what is refused slows no other one."""

_ENDED = "the process that tries grammars has ended"

Tokens = Callable[[], tuple[list[bytes], list[int]]]
"""The texts of all tokens by id, none of them empty, and the ids of those that end a reply."""


class GrammarTrials:
    """Tries each new grammar once. Grammars of one caller are tried one after the other, those of others at the same time."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers, self._waiting = itertools.count(), dict[int, asyncio.Future[str | None]]()
        self._known: OrderedDict[int, str | None] = OrderedDict()
        self._turns = FairTurns(MAX_TRIALS, MAX_WAITING)

    async def check(self, source: GrammarSource, caller: str) -> None:
        """Return if a grammar can be compiled.

        caller: what distinguishes callers; those without a name of their own share one.

        Raises:
            InvalidRequest: It cannot, or costs too much; names the field.
            Overloaded: Too many trials are waited for.
            Unavailable: The process of trials ended.
        """
        key = hash(source.text)
        if self._known.get(key, "new") is not None:
            async with self._turns.turn(caller) as turn:
                if key not in self._known:
                    self._known[key] = await self._tried(source)
                turn.rest_s = REFUSED_REST_S if self._known[key] is not None else 0.0
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if (problem := self._known[key]) is not None:
            raise invalid(source.field, problem)

    async def refused(self, caller: str) -> None:
        """What a caller asked for was refused without a trial: wait for its turn, as for one.

        Raises:
            Overloaded: Too many trials are waited for.
        """
        async with self._turns.turn(caller) as turn:
            turn.rest_s = REFUSED_REST_S

    async def _tried(self, source: GrammarSource) -> str | None:
        """The problem of a grammar; None if it has none."""
        async with self._starting:
            if self._reading is None or self._reading.done():  # a process's exit status comes later than its end
                await self._start()
        if self._reading is None or self._reading.done():
            raise Unavailable(_ENDED)
        number = next(self._numbers)
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._send([number, source.text, source.field])
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.worker_service.grammar.trial_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = supervise("grammar-trials", self._read, endless=False)
        try:
            texts, eos_ids = await asyncio.to_thread(self._tokens)
            await self._send([[base64.b64encode(text).decode() for text in texts], eos_ids])
        except BaseException:  # without a vocabulary it is of no use
            self._process.kill()
            raise

    async def _send(self, message: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it ended: `_read` tells those that wait
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, problem = json.loads(line)
            if (future := self._waiting.get(number)) is not None and not future.done():
                future.set_result(problem)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(_ENDED))

    async def close(self) -> None:
        """End the process, with the trials that run."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await end(self._reading)
