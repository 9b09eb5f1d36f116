"""The SLO of one tier's reply in the router: what is left of it for the next worker, and whether it was kept. No I/O."""

import math

from penstock.services.domain.slo.attainment import Attainment, AttainmentTracker
from penstock.services.domain.slo.promises import MIN_REMAINDER_S, PhaseTracker, Promise
from penstock.types.replies import TokenFrame
from penstock.types.slo import Slo, SloClass, SloFallback


class ReplyPromise:
    """One reply's promise, over all instances that compute it. Times are the event loop's.

    slo_class: in which the reply is served now; None before an instance has admitted it. promised: whether it was ever
    STANDARD.
    """

    def __init__(self, promise: Promise, produced_tokens: int = 0, text: str = "") -> None:
        """produced_tokens, text: of a reply that a client resumes; it is never declined."""
        self.first_token_due_s = math.inf if promise.first_token_due_s is None else promise.first_token_due_s
        """Infinite if none was asked for."""
        self.fallback = SloFallback.BEST_EFFORT if produced_tokens else promise.fallback
        self._attainment = AttainmentTracker(promise.first_token_due_s)
        self._phases = PhaseTracker(promise.phases)
        if produced_tokens:
            self._phases.advance(produced_tokens, text)
        self._begun = False
        self.slo_class: SloClass | None = None
        self.promised = False

    @property
    def has_pace(self) -> bool:
        return bool(self._phases.remaining)

    @property
    def attainment(self) -> Attainment:
        return self._attainment.result()

    def granted(self, slo: Slo | None, *, slo_kept: bool) -> SloClass:
        """Note the class that a worker serves the reply in; return it.

        slo: what it was asked for. slo_kept: whether it promises to keep that.
        """
        if self._begun and (slo is None or not slo.asks) and self.slo_class is not None:
            return self.slo_class  # all that was promised has been kept
        self.slo_class = SloClass.STANDARD if slo_kept else SloClass.BEST_EFFORT
        self.promised = self.promised or slo_kept
        return self.slo_class

    def take(self, frame: TokenFrame, now_s: float) -> None:
        """Count the tokens of a frame that has come now."""
        count = len(frame.token_ids)
        for i in range(count):
            self._attainment.token(now_s, self._phases.tpot_s)
            self._phases.advance(1, frame.text if i == count - 1 else "")
        self._begun = self._begun or count > 0

    def next_token_due_s(self) -> float:
        """When the next token is due at the latest: the first by its deadline, a later one so that its window is kept."""
        if not self._begun:
            return self.first_token_due_s
        return math.inf if self._phases.tpot_s is None else self._attainment.next_due_s(self._phases.tpot_s)

    def remainder(self, now_s: float) -> Slo | None:
        """What is left of the promise for a worker that gets the reply now; None if nothing is."""
        due_s = self.next_token_due_s()
        left_s = None if math.isinf(due_s) else max(MIN_REMAINDER_S, due_s - now_s)
        slo = Slo(left_s, self._phases.remaining)
        return slo if slo.asks else None

    def allows_stall(self, stall_s: float, now_s: float) -> bool:
        """Whether the next token would still be in time if the reply stalled now. Only a kept promise can be broken."""
        return self.slo_class is not SloClass.STANDARD or now_s + stall_s <= self.next_token_due_s()
