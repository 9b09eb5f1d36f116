"""What is kept of a request's answers that were not accepted. No I/O."""

from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.services.acceptance.best_answer import best_of
from penstock.types.requests import Draft


class RejectedAnswers:
    """Rejected answers of one request, of which at most one is kept as a whole, however many tiers it visits.

    draft: the latest one, or its beginning, for the next tier; None if there is none. best: the one that may be delivered
    instead of a later answer; None if there is none, and where the plan always delivers the last answer.
    """

    def __init__(self, *, keeps_best: bool) -> None:
        self._keeps_best = keeps_best
        self.draft: Draft | None = None
        self.best: TierAnswer | None = None

    def add(self, answer: TierAnswer) -> None:
        """An answer has been rejected, or its tier has failed. Only a finished answer has a score."""
        self.draft = answer.as_draft() or self.draft
        if not self._keeps_best or answer.score is None or self.better_than(answer) is not None:
            answer.drop()
            return
        if self.best is not None:
            self.best.drop()
        self.best = answer

    def end(self) -> None:
        """The request has ended, also with an error: end the span of the answer that was kept."""
        if self.best is not None:
            self.best.end_span()

    def better_than(self, answer: TierAnswer) -> TierAnswer | None:
        """The answer to deliver instead of a later one, which is accepted; None if that one is the best."""
        if self.best is None:
            return None
        return (self.best, None)[best_of((self.best.score, answer.score))]
