"""Which model drafts and how far ahead, by predicted tokens per second. No I/O.

SpecRouter (section 4) chooses the chain with the least predicted time per token. Here a pass that verifies is priced as one
pass over all its rows, not as single steps (its equation 7); the target alone is the default; and what exploring other
choices may cost is limited, for which the paper gives no rule.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from worker_service.speculation.estimates import Acceptance, DraftCost, PassCost

GAIN = 1.03
"""Least predicted gain over the target alone for which there is drafting at all."""
SWITCH_GAIN = 1.05
"""Least predicted gain for which one model is left for another, which has to compute the prompts first."""
WINDOW_GAIN = 1.01
"""The same for another window of the same model, which costs nothing."""
EXPLORED_SHARE = 0.01
"""Share of the time that exploring may cost."""
EXPLORED_WINDOW = 3
CHOSEN_STEPS = 4
"""Steps for which a choice holds if the number of replies stays: choosing takes a few hundredths of a small model's step."""
MOST_CREDIT_STEPS = 4
"""Time for exploring is saved up to so many steps of the target."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way of drafting: the index of the model, and how many tokens it drafts."""

    model: int
    window: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of one model that drafts."""

    acceptance: Acceptance
    cost: DraftCost


def tokens_per_s(replies: int, target: PassCost, models: Seq[Estimate], candidate: Candidate | None) -> float:
    """Predicted tokens per second of a batch; None: of the target alone."""
    if candidate is None:
        return replies / target.seconds(replies, replies)
    estimate = models[candidate.model]
    drafted = replies * estimate.acceptance.drafted(candidate.window)
    seconds = target.seconds(replies, replies + drafted) + estimate.cost.seconds(replies, drafted)
    return replies * estimate.acceptance.tokens(candidate.window) / seconds


def best(replies: int, target: PassCost, models: Seq[Estimate], windows: Seq[int]) -> tuple[Candidate | None, float]:
    """The candidate with the most predicted tokens per second, and these. None, the target alone, wins ties."""
    candidates = (Candidate(model, window) for model in range(len(models)) for window in windows)
    rates = [(tokens_per_s(replies, target, models, c), c) for c in candidates]
    rate, candidate = max(rates, key=lambda pair: pair[0], default=(0.0, None))
    alone = tokens_per_s(replies, target, models, None)
    return (candidate, rate) if rate > alone else (None, alone)


class Chooser:
    """Chooses before each step, and decides when another candidate is tried."""

    def __init__(self, target: PassCost, models: Seq[Estimate], max_window: int) -> None:
        self.target, self.models = target, models
        self._windows = windows(max_window)
        self._credit_s = 0.0
        self._explored = 0
        self._chosen_for = (0, 0)  # replies, and the steps for which the choice still holds
        self.current: Candidate | None = None
        self.switches = 0

    def choose(self, replies: int) -> Candidate | None:
        """How to draft for the next step of so many replies; None: not at all."""
        chosen_for, steps = self._chosen_for
        if replies == chosen_for and steps:
            self._chosen_for = replies, steps - 1
            return self.current
        self._chosen_for = replies, CHOSEN_STEPS - 1
        candidate, rate = best(replies, self.target, self.models, self._windows)
        alone = tokens_per_s(replies, self.target, self.models, None)
        current = tokens_per_s(replies, self.target, self.models, self.current)
        pays = rate >= GAIN * alone
        if self.current is None or current < alone:
            self._switch(candidate if pays else None)
        elif candidate is not None:
            same_model = candidate.model == self.current.model
            if rate > (WINDOW_GAIN if same_model else SWITCH_GAIN) * current:
                self._switch(candidate)
        return self.current

    def _switch(self, candidate: Candidate | None) -> None:
        self.switches += candidate != self.current
        self.current = candidate

    def saved_s(self, replies: int) -> float:
        """Predicted seconds that drafting as chosen saves per token of a reply."""
        if self.current is None:
            return 0.0
        current = tokens_per_s(replies, self.target, self.models, self.current)
        return max(0.0, 1 / tokens_per_s(replies, self.target, self.models, None) - 1 / current)

    def least(self, replies: int) -> float:
        """The chance to stand from which on one more token is worth its row in the pass and its drafting."""
        if self.current is None:
            return 0.0
        estimate = self.models[self.current.model]
        most = replies * self._windows[-1]  # over the whole range, since measured points vary
        row_s = (self.target.seconds(replies, replies + most) - self.target.seconds(replies, replies)) / most
        rate = tokens_per_s(replies, self.target, self.models, self.current)
        return max(0.0, row_s + estimate.cost.token_s) * rate

    def explore(self, replies: int, missing: Callable[[int], int]) -> Candidate | None:
        """A model to try with one reply in the next step; None: none is to be tried, or it would cost too much.

        missing: by model, the tokens that it has to compute before it can draft for that reply.
        """
        step_s = self.target.seconds(replies, replies)
        self._credit_s = min(MOST_CREDIT_STEPS * step_s, self._credit_s + EXPLORED_SHARE * step_s)
        others = [m for m in range(len(self.models)) if self.current is None or m != self.current.model]
        if not others:
            return None
        model = others[self._explored % len(others)]
        cost, window = self.models[model].cost, min(EXPLORED_WINDOW, self._windows[-1])
        price_s = cost.seconds(1, window) + max(0.0, self.target.seconds(replies, replies + window) - step_s)
        if price_s <= self._credit_s:
            price_s += cost.catch_up_s(missing(model))
        if price_s > self._credit_s:
            if price_s > MOST_CREDIT_STEPS * step_s:  # it cannot be saved up: another model may cost less
                self._explored += 1
            return None
        self._credit_s -= price_s
        self._explored += 1
        return Candidate(model, window)

    def remove(self, model: int) -> None:
        """A model has failed; the indices of those behind it change."""
        self.models = [estimate for i, estimate in enumerate(self.models) if i != model]
        self.current, self._chosen_for = None, (0, 0)


def windows(max_window: int) -> list[int]:
    """The windows to choose from, up to `max_window`: the effect of one more token falls with their number."""
    return [w for w in (1, 2, 3, 5, 7, 11, 15) if w < max_window] + [max_window]
