"""When an engine's requests are sent to its SGLang server: at once, or under SLOs by the turns of `ShadowScheduler`."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.services.domain.slo.attainment import PACE_WINDOW_TOKENS
from penstock.types.slo import SloClass
from penstock.worker_service.engine.sglang.moves import Running
from penstock.worker_service.scheduling.sequence import SequenceSlo

if TYPE_CHECKING:
    from penstock.worker_service.engine.sglang.shadow import ShadowScheduler

_log = logging.getLogger(__name__)

GATHER_S = 0.002
"""Requests that arrive within this time are decided on together."""


@dataclass(slots=True)
class _Window:
    """The latest tokens of the request whose steps are observed."""

    server_id: str
    since_s: float
    predicted_s: float = 0.0
    tokens: int = 0


class SendQueue:
    """The requests of one engine on their way to its server.

    Every request waits in `turn` until it may be sent. What may be sent changes when a request is admitted, when its first
    token arrives, and when it leaves the server; the engine reports each with `advance`.
    """

    def __init__(
        self,
        requests: Mapping[str, Running],
        pause: Callable[[Running], None],
        shadow: "ShadowScheduler | None",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """requests: all of the engine, by arrival. pause: aborts one on the server. shadow: None without SLOs."""
        self._requests, self._pause, self._shadow, self._now = requests, pause, shadow, now
        self._undecided: list[tuple[Running, SequenceSlo]] = []
        self._decided = asyncio.Event()
        """Of the requests that are decided on next."""
        self._window: _Window | None = None

    async def admit(self, running: Running, slo: SequenceSlo) -> bool:
        """Whether a request is promised its SLO; decided together with those that arrive at the same time."""
        self._undecided.append((running, slo))
        if len(self._undecided) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._decide)
        await self._decided.wait()
        return slo.granted is SloClass.STANDARD

    def _decide(self) -> None:
        assert self._shadow is not None
        undecided, self._undecided = self._undecided, []
        decided, self._decided = self._decided, asyncio.Event()
        here = list(self._requests.values())
        new = [r for r, _ in undecided if r in here and not r.aborted]
        admitted: list[Running] = []
        try:
            answers = self._shadow.decide(self._now(), [r for r in here if r not in new], new)
            admitted = [running for running, yes in zip(new, answers, strict=True) if yes]
        except Exception:
            _log.exception("admission failed: these requests are served as best effort")
        for running, slo in undecided:
            slo.granted = SloClass.STANDARD if running in admitted else SloClass.BEST_EFFORT
        decided.set()

    async def turn(self, running: Running) -> bool:
        """Wait until a request may be sent; False if it was aborted meanwhile."""
        if running.aborted:
            return False
        running.turn = asyncio.get_running_loop().create_future()
        self.advance()
        try:
            return await running.turn
        finally:
            running.turn = None

    def end_turn(self, running: Running) -> bool:
        """End the turn of an aborted request; whether it waited for one."""
        if running.turn is None or running.turn.done():
            return False
        running.turn.set_result(False)
        return True

    def advance(self) -> None:
        """Send and pause what is to be sent and paused now."""
        requests = [r for r in self._requests.values() if r.turn is None or not r.turn.done()]
        if self._shadow is None:
            send = [r for r in requests if r.waits]
        else:
            turns = self._shadow.plan(requests)
            send = list(turns.send)
            for running in turns.pause:
                running.preempted, running.sent = True, False
                running.preemptions += 1
                self._pause(running)
        for running in send:
            assert running.turn is not None
            running.sent, running.answered = True, False
            running.turn.set_result(True)

    def arrived(self, running: Running, tokens: int) -> None:
        """Tokens of a request have arrived together; as many as these will arrive next, the last of them at the pace."""
        now_s = self._now()
        if running.preempted:  # the server did not have it yet when it was told to end it
            self._pause(running)
        if running.slo is not None:
            running.slo.due_s = now_s + tokens * running.slo.tpot_s
        self._observe(running, tokens, now_s)
        if not running.answered:
            running.answered = True
            self.advance()

    def _observe(self, running: Running, tokens: int, now_s: float) -> None:
        """Compare steps with their prediction: of the request that has decoded longest, over as many tokens as its pace is
        judged by. Of tokens that arrive in bursts, single gaps say nothing."""
        if self._shadow is None:
            return
        first = next((r for r in self._requests.values() if r.sent and r.answered), None)
        if running is not first:
            return
        window = self._window
        if window is None or window.server_id != running.server_id:
            self._window = _Window(running.server_id, now_s)
            return
        window.predicted_s += tokens * self._shadow.uncorrected_step_s(r for r in self._requests.values() if r.sent)
        window.tokens += tokens
        if window.tokens >= PACE_WINDOW_TOKENS:
            self._shadow.correction.add(window.predicted_s, now_s - window.since_s)
            self._window = _Window(running.server_id, now_s)

    def left(self, running: Running) -> None:
        """A request is on the server no longer."""
        running.sent = running.answered = False
        self.advance()
