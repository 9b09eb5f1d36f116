"""What a request was promised, and which phase its reply has reached. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types.slo import Slo, SloFallback, SloPhase

MIN_REMAINDER_S = 0.001
"""A deadline that has passed travels as this: zero would read as "no deadline", and the class of a request never changes."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The SLO of one request, its deadline absolute on the clock of the process that holds it.

    first_token_due_s: when the first token is due; None where none was asked for. It is set once, when the router receives
        the request. What is sent to a worker is the remainder, so that tiers, hops and failovers share one budget.
    phases: the pace, by output token or marker, as in Slo. fallback: what follows where no worker can keep it.
    class_name: the named class that was asked for; empty where the latencies were the request's own.
    """

    first_token_due_s: float | None
    phases: tuple[SloPhase, ...] = ()
    fallback: SloFallback = SloFallback.BEST_EFFORT
    class_name: str = ""

    @classmethod
    def received(cls, slo: Slo, now_s: float) -> "Promise":
        """The promise of a request that is received now."""
        due_s = None if slo.time_to_first_token_s is None else now_s + slo.time_to_first_token_s
        return cls(due_s, slo.phases, slo.fallback or SloFallback.BEST_EFFORT, slo.name)

    def tightest_tpot_s(self) -> float | None:
        """The tightest pace of all phases: what admission reserves for (section 3.2.1, multi-decode SLOs)."""
        return min((phase.time_per_output_token_s for phase in self.phases), default=None)


class PhaseTracker:
    """Finds the pace in force while a reply grows.

    A phase begins at its output token, or with the first token after its marker. Phases come in order: one after the
    current phase is never entered again. Text may be cut anywhere, a marker in two included.
    """

    __slots__ = ("_current", "_phases", "_tail", "_tokens")

    def __init__(self, phases: Sequence[SloPhase]) -> None:
        self._phases, self._tokens, self._tail = tuple(phases), 0, ""
        self._current = -1
        self._enter_by_count()

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token promised for the next token; None where no phase has begun."""
        return self._phases[self._current].time_per_output_token_s if self._current >= 0 else None

    @property
    def remaining(self) -> tuple[SloPhase, ...]:
        """The current phase, as one that begins at once, and the later ones: what is left for another worker to keep."""
        later = self._phases[self._current + 1 :]
        if self._current < 0:
            return later
        return (SloPhase(0, self._phases[self._current].time_per_output_token_s), *later)

    def advance(self, tokens: int, text: str = "") -> None:
        """Count tokens that have arrived, with their text."""
        self._tokens += tokens
        self._enter_by_count()
        seen = self._tail + text
        while (marker := self._next_marker()) and (at := seen.find(marker)) >= 0:
            self._current += 1
            seen = seen[at + len(marker) :]
            self._enter_by_count()
        longest = max((len(p.after_marker) for p in self._phases), default=0)
        self._tail = seen[-(longest - 1) :] if longest > 1 else ""

    def _next_marker(self) -> str:
        following = self._current + 1
        return self._phases[following].after_marker if following < len(self._phases) else ""

    def _enter_by_count(self) -> None:
        while self._current + 1 < len(self._phases):
            following = self._phases[self._current + 1]
            if following.after_marker or following.from_output_token > self._tokens:
                return
            self._current += 1
            self._tail = ""  # a marker counts only after the beginning of the phase before it
