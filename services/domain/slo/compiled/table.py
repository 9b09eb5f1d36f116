"""The requests that the compiled scheduler knows, by order of arrival. No I/O, no clock."""

from dataclasses import dataclass

import numpy as np

from services.domain.slo.compiled.layout import (
    COUNTS,
    TIMES,
    F,
    N,
)

FIRST_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that asks for admission, or is to be served as best effort.

    due_s: when its next token is due, on the table's clock. tpot_s: its tightest pace; infinite for none.
    pending_tokens: to compute before the next token; context_tokens: whose KV is there already. output_tokens: predicted, still to come.
    memory_tokens: of KV that admission reserves for it. value: what attaining its SLO is worth.
    """

    request_id: str
    due_s: float
    tpot_s: float
    pending_tokens: int
    output_tokens: int
    memory_tokens: int
    context_tokens: int = 0
    value: float = 1.0
    decoding: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the standard requests of a table, to decide on while the step under way goes on."""

    counts: N
    times: F
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Who of the candidates is admitted, by their order; release times of the running and the admitted, by id.

    replays: how many certificates were tried.
    """

    admitted: tuple[bool, ...]
    release_s: dict[str, float]
    replays: int


class RequestTable:
    """Columns of standard and best-effort requests, in order of arrival.

    The loop is: `plan`, compute, `commit`; between the two nothing else may be called but `snapshot`.
    """

    def __init__(self) -> None:
        self._counts, self._times = np.zeros((COUNTS, FIRST_CAPACITY), np.int64), np.zeros((TIMES, FIRST_CAPACITY))
        self._order, self._grants = np.zeros(FIRST_CAPACITY, np.int64), np.zeros(FIRST_CAPACITY, np.int64)
        self.ids: list[str] = []

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def counts(self) -> N:
        return self._counts[:, : len(self.ids)]

    @property
    def times(self) -> F:
        return self._times[:, : len(self.ids)]
