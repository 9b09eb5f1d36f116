"""Which model drafts and how far ahead, by predicted tokens per second. No I/O.

SpecRouter (section 4) chooses what has the least predicted time per token. Here a pass that verifies is priced as one pass
over all its rows, not as single steps (its equation 7); the target alone is the default; and what exploring other choices may
cost is limited, for which the paper gives no rule. Its chains of several models are left out: on published A100 profiles the
best one is at most 2.7 % faster than the best model alone.
"""

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.services.domain.slo.draft_windows import FIRST_PACE, DraftPace
from penstock.services.domain.speculation.estimates import Acceptance, DraftCost, PassCost

GAIN = 1.03
"""Least predicted gain over the target alone for which there is drafting at all."""
WINDOW_GAIN = 1.01
"""Least predicted gain for which the window or the model changes."""
EXPLORED_SHARE = 0.01
"""Share of the time that exploring may cost."""
EXPLORED_WINDOW = 3
EXPLORED_DRAFTS = 8
"""Drafts in a row for which a model is tried: most of the price is the first one's, for which it computes a prompt."""
MOST_VAIN_PRICE = 16
"""Each time that so many drafts of a model were in vain, the next one is charged double, up to so much: a model that drafts
garbage is hardly tried any more. One token that is accepted ends that."""
CHOSEN_STEPS = 8
"""Steps for which a choice, and what follows from it, holds if the number of replies stays: choosing takes a few tenths of a
millisecond, a tenth of a small model's step."""
MOST_CREDIT_STEPS = 4
"""Time for exploring is saved up to so many steps of the target."""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A way of drafting: the index of a model, and how many tokens it drafts."""

    model: int
    window: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of one model that drafts. acceptance: of its tokens by the target. cost: of its drafts."""

    acceptance: Acceptance
    cost: DraftCost

    def upper(self) -> "Estimate":
        """With the acceptance that it may well have."""
        return Estimate(self.acceptance.upper(), self.cost)


@dataclass(frozen=True, slots=True)
class DraftPrediction:
    """Of one step of a batch. tokens: that the replies get. seconds: drafting and the pass. drafted_s: drafting."""

    tokens: float
    seconds: float
    drafted_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def predicted(
    replies: int, target: PassCost, models: Seq[Estimate], candidate: DraftCandidate | None, prompts: float = 0.0
) -> DraftPrediction:
    """The step of a batch of so many replies; candidate None: of the target alone.

    prompts: tokens of prompts that come with each output token. Models that draft compute them, too: the shorter replies are
    next to their prompts, the more that costs.
    """
    if candidate is None:
        return DraftPrediction(replies, target.seconds(replies, replies), 0.0)
    model, window = models[candidate.model], candidate.window
    length, tokens = model.acceptance.drafted(window), model.acceptance.tokens(window)
    drafted_s = model.cost.seconds(replies, replies * length)
    prompts_s = model.cost.catch_up_s(replies * tokens * prompts)
    seconds = target.seconds(replies, replies * (1 + length)) + drafted_s + prompts_s
    return DraftPrediction(replies * tokens, seconds, drafted_s)


def _share(tokens: float, length: int) -> float:
    """The share a of tokens that are accepted for which 1 + a + ... + a^length is `tokens`, by halving."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(length + 1)) < tokens else (low, middle)
    return low


def tokens_per_s(replies: int, target: PassCost, models: Seq[Estimate], candidate: DraftCandidate | None) -> float:
    """Predicted tokens per second of a batch; None: of the target alone."""
    return predicted(replies, target, models, candidate).tokens_per_s


def candidates(models: Seq[Estimate], windows: Seq[int]) -> Iterator[DraftCandidate]:
    """Each model with each window."""
    return (DraftCandidate(model, window) for model in range(len(models)) for window in windows)


def best(
    replies: int, target: PassCost, models: Seq[Estimate], windows: Seq[int]
) -> tuple[DraftCandidate | None, float]:
    """The candidate with the most predicted tokens per second, and these. None, the target alone, wins ties."""
    rates = [(tokens_per_s(replies, target, models, c), c) for c in candidates(models, windows)]
    rate, candidate = max(rates, key=lambda pair: pair[0], default=(0.0, None))
    alone = tokens_per_s(replies, target, models, None)
    return (candidate, rate) if rate > alone else (None, alone)


class Chooser:
    """Chooses before each step, and decides when another model is tried."""

    def __init__(self, target: PassCost, models: Seq[Estimate], max_window: int) -> None:
        """models: small to large."""
        self.target, self.models = target, list(models)
        self.prompts = 0.0
        """Tokens of prompts that come with each output token, on average."""
        self._windows = windows(max_window)
        self._credit_s = 0.0
        self._explored = 0
        self._tried: int | None = None  # the model that is tried until its drafts are made
        self._chosen_for = (0, 0)  # replies, and the steps for which the choice still holds
        self._lost_s = 0.0  # by the present model, since another one leads
        self._known = dict[Hashable, float]()  # what follows from the present choice, until the next one
        self.current: DraftCandidate | None = None
        self.switches = 0

    def choose(self, replies: int, missing: Callable[[int], int]) -> DraftCandidate | None:
        """How to draft for the next step of so many replies; None: not at all.

        missing: the tokens of all these replies that a model has to compute before it can draft for them.
        """
        chosen_for, steps = self._chosen_for
        if replies == chosen_for and steps:
            self._chosen_for = replies, steps - 1
            return self.current
        self._chosen_for = replies, CHOSEN_STEPS - 1
        self._known.clear()
        alone = self._rate(replies, None)
        current = self._rate(replies, self.current)
        by_model = self._best_windows(replies)
        if self.current is None or current < alone:
            self._switch(self._leader(replies, [c for rate, c in by_model if rate >= GAIN * alone]))
            return self.current
        leader = self._leader(replies, [c for rate, c in by_model if rate >= alone])
        rate, own = by_model[self.current.model]
        if leader is None or leader.model == self.current.model:
            self._lost_s = 0.0
        elif self._repays(replies, leader, own, CHOSEN_STEPS - steps, missing):
            self._switch(leader)
            return self.current
        if rate > WINDOW_GAIN * current:
            self._switch(own)
        return self.current

    def _repays(
        self, replies: int, leader: DraftCandidate, own: DraftCandidate, steps: int, missing: Callable[[int], int]
    ) -> bool:
        """Whether what the present model has lost against another one is the price of the prompts that this one computes."""
        models = [model.upper() for model in self.models]
        present, other = (self._predicted(replies, candidate, models) for candidate in (own, leader))
        lost_s = present.seconds - present.tokens / other.tokens_per_s
        if other.tokens_per_s > WINDOW_GAIN * present.tokens_per_s:
            self._lost_s += steps * lost_s
        return self._lost_s > self.models[leader.model].cost.catch_up_s(missing(leader.model))

    def _switch(self, candidate: DraftCandidate | None) -> None:
        if candidate is None or self.current is None or candidate.model != self.current.model:
            self._lost_s = 0.0
        self.switches += candidate != self.current
        self.current = candidate

    def _predicted(
        self, replies: int, candidate: DraftCandidate | None, models: Seq[Estimate] | None = None
    ) -> DraftPrediction:
        return predicted(replies, self.target, models or self.models, candidate, self.prompts)

    def _rate(self, replies: int, candidate: DraftCandidate | None, models: Seq[Estimate] | None = None) -> float:
        return self._predicted(replies, candidate, models).tokens_per_s

    def _best_windows(self, replies: int) -> list[tuple[float, DraftCandidate]]:
        """By model, the most predicted tokens per second, and the window that has them."""
        every = [[DraftCandidate(model, window) for window in self._windows] for model in range(len(self.models))]
        return [max(((self._rate(replies, c), c) for c in each), key=lambda pair: pair[0]) for each in every]

    def _leader(self, replies: int, paying: Seq[DraftCandidate]) -> DraftCandidate | None:
        """Of one candidate per model, the fastest if what little is known of a model was bad luck; None of none."""
        if len(paying) < 2:
            return paying[0] if paying else None
        models = [model.upper() for model in self.models]
        return max(paying, key=lambda candidate: self._rate(replies, candidate, models))

    def pace(self, replies: int) -> DraftPace:
        """What a drafted token is worth and what it costs, on average over the window of the model that drafts now, or of the
        best one while none does."""
        candidate = self.current
        if candidate is None:
            every = candidates(self.models, self._windows)
            candidate = max(every, key=lambda c: self._rate(replies, c), default=None)
        if candidate is None:
            return FIRST_PACE
        prediction = predicted(replies, self.target, self.models, candidate)
        window = candidate.window
        return DraftPace(_share(prediction.tokens / replies, window), prediction.drafted_s / window)

    def least(self, replies: int) -> float:
        """The probability from which on one more token is worth its row in the pass and its drafting."""
        if self.current is None:
            return 0.0
        if "least" not in self._known:
            estimate = self.models[self.current.model]
            most = replies * self._windows[-1]  # over the whole range, since measured points vary
            row_s = (self.target.seconds(replies, replies + most) - self.target.seconds(replies, replies)) / most
            rate = self._rate(replies, self.current)
            self._known["least"] = max(0.0, row_s + estimate.cost.token_s) * rate
        return self._known["least"]

    def explore(self, replies: int, missing: Callable[[int], int]) -> DraftCandidate | None:
        """A model to try with one reply in the next step; None: none is to be tried, or it would cost too much.

        missing: the tokens that a model has to compute before it can draft for that reply.
        """
        if "step" not in self._known:
            self._known["step"] = self.target.seconds(replies, replies)
        step_s = self._known["step"]
        self._credit_s = min(MOST_CREDIT_STEPS * step_s, self._credit_s + EXPLORED_SHARE * step_s)
        present = self.current.model if self.current is not None else None
        others = [model for model in range(len(self.models)) if model != present]
        if not others:
            return None
        if self._tried not in others:
            self._tried = self._next_tried(replies, others)
        model = self._tried
        assert model is not None
        vain = self.models[model].acceptance.in_vain // EXPLORED_DRAFTS
        tried = DraftCandidate(model, 1 if vain else min(EXPLORED_WINDOW, self._windows[-1]))
        if tried not in self._known:
            drafted_s = predicted(1, self.target, self.models, tried).drafted_s
            self._known[tried] = drafted_s + max(0.0, self.target.seconds(replies, replies + tried.window) - step_s)
        price_s = self._known[tried]
        if price_s <= self._credit_s:
            price_s += self.models[model].cost.catch_up_s(missing(model))
        if price_s > self._credit_s:
            if price_s > MOST_CREDIT_STEPS * step_s:  # it cannot be saved up: another model may cost less
                self._explored += EXPLORED_DRAFTS - self._explored % EXPLORED_DRAFTS
                self._tried = None
            return None
        self._credit_s -= price_s * min(MOST_VAIN_PRICE, 2**vain)
        self._explored += 1
        if self._explored % EXPLORED_DRAFTS == 0:
            self._tried = None
        return tried

    def _next_tried(self, replies: int, others: Seq[int]) -> int:
        """Of models that do not draft: by turns each of them, and the one that may be the fastest."""
        turn, leading = divmod(self._explored // EXPLORED_DRAFTS, 2)
        if not leading or len(others) == 1:
            return others[turn % len(others)]
        leader = self._leader(replies, [c for _, c in self._best_windows(replies) if c.model in others])
        return others[0] if leader is None else leader.model

    def remove(self, model: int) -> None:
        """A model has failed; the indices of those after it change."""
        del self.models[model]
        self.current, self._chosen_for, self._tried = None, (0, 0), None
        self._known.clear()


def windows(max_window: int) -> list[int]:
    """The windows to choose from, up to `max_window`: the effect of one more token falls with their number."""
    return [w for w in (1, 2, 3, 5, 7, 11, 15) if w < max_window] + [max_window]
