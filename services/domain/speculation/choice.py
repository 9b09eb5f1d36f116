"""Which models draft and how far ahead, by predicted tokens per second. No I/O.

A chain is a list of models, small to large: the first one drafts, each further one verifies what the one before it proposes
and passes on what it draws as well, followed by its own token. So what a model rejects, the next one never sees.

SpecRouter (section 4) chooses the chain with the least predicted time per token. Here a pass that verifies is priced as one
pass over all its rows, not as single steps (its equation 7); the probability to reach a position (its P(reach), which it does
not define) is the product of the shares that are accepted before it; the target alone is the default; and what
exploring other choices may cost is limited, for which the paper gives no rule.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from penstock.services.domain.slo.draft_windows import FIRST_PACE, DraftPace
from penstock.services.domain.speculation.estimates import Acceptance, DraftCost, PassCost

GAIN = 1.03
"""Least predicted gain over the target alone for which there is drafting at all."""
WINDOW_GAIN = 1.01
"""Least predicted gain for which the window or the chain changes."""
EXPLORED_SHARE = 0.01
"""Share of the time that exploring may cost."""
EXPLORED_WINDOW = 3
EXPLORED_DRAFTS = 8
"""Drafts in a row for which a chain is tried: most of the price is the first one's, for which it computes a prompt."""
MOST_VAIN_PRICE = 16
"""Each time that so many drafts of a chain were in vain, the next one is charged double, up to so much: a model that drafts
garbage is hardly tried any more. One token that is accepted ends that."""
CHOSEN_STEPS = 8
"""Steps for which a choice, and what follows from it, holds if the number of replies stays: choosing takes a few tenths of a
millisecond, a tenth of a small model's step."""
MOST_CREDIT_STEPS = 4
"""Time for exploring is saved up to so many steps of the target."""


@dataclass(frozen=True, slots=True)
class ChainCandidate:
    """A way of drafting: the indices of a chain's models, small to large, and how many tokens the first one drafts."""

    chain: tuple[int, ...]
    window: int

    @property
    def last(self) -> int:
        """The model whose tokens the target verifies."""
        return self.chain[-1]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of one model that drafts.

    acceptance: of its tokens by the target. cost: of its drafts. passes: of its passes that verify; None if it verifies
    nothing. by: acceptance of its tokens by other models, by their index.
    """

    acceptance: Acceptance
    cost: DraftCost
    passes: PassCost | None = None
    by: dict[int, Acceptance] = field(default_factory=dict)

    def upper(self) -> "Estimate":
        """With the acceptance that it may well have."""
        by = {model: acceptance.upper() for model, acceptance in self.by.items()}
        return Estimate(self.acceptance.upper(), self.cost, self.passes, by)

    def accepted_by(self, model: int) -> Acceptance:
        """Acceptance of its tokens by another model."""
        return self.by.setdefault(model, Acceptance(self.acceptance.max_window))


@dataclass(frozen=True, slots=True)
class ChainPrediction:
    """Of one step of a batch. tokens: that the replies get. seconds: drafting and the pass. drafted_s: drafting."""

    tokens: float
    seconds: float
    drafted_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def predicted(
    replies: int, target: PassCost, models: Seq[Estimate], candidate: ChainCandidate | None, prompts: float = 0.0
) -> ChainPrediction:
    """The step of a batch of so many replies; candidate None: of the target alone.

    prompts: tokens of prompts that come with each output token. Models that draft compute them, too: the shorter replies are
    next to their prompts, the more that costs.
    """
    if candidate is None:
        return ChainPrediction(replies, target.seconds(replies, replies), 0.0)
    chain, window = candidate.chain, candidate.window
    first = models[chain[0]]
    if len(chain) == 1:
        length, tokens = first.acceptance.drafted(window), first.acceptance.tokens(window)
        drafted_s = first.cost.seconds(replies, replies * length)
    else:
        present = [1.0] * window  # at each position, the probability that the proposal has a token there
        drafted_s = first.cost.seconds(replies, replies * window)
        for lower, upper in itertools.pairwise(chain):
            passes = models[upper].passes
            assert passes is not None  # of those that verify, `chains` yields no other
            drafted_s += passes.seconds(replies, replies * (1 + sum(present)))
            # A proposal of the upper model has its own token after as many as it accepts.
            present = [1.0, *_standing(present, models[lower].accepted_by(upper))]
        length, tokens = sum(present), 1 + sum(_standing(present, models[chain[-1]].acceptance))
    prompts_s = sum(models[m].cost.catch_up_s(replies * tokens * prompts) for m in chain)
    seconds = target.seconds(replies, replies * (1 + length)) + drafted_s + prompts_s
    return ChainPrediction(replies * tokens, seconds, drafted_s)


def _standing(present: Seq[float], acceptance: Acceptance) -> list[float]:
    """The probability that a proposal is accepted up to and with each position."""
    reached = itertools.accumulate((acceptance.share(i) for i in range(len(present))), lambda a, b: a * b)
    return [there * stands for there, stands in zip(present, reached, strict=True)]


def _share(tokens: float, length: int) -> float:
    """The share a of tokens that are accepted for which 1 + a + ... + a^length is `tokens`, by halving."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(length + 1)) < tokens else (low, middle)
    return low


def tokens_per_s(replies: int, target: PassCost, models: Seq[Estimate], candidate: ChainCandidate | None) -> float:
    """Predicted tokens per second of a batch; None: of the target alone."""
    return predicted(replies, target, models, candidate).tokens_per_s


def chains(models: Seq[Estimate]) -> list[tuple[int, ...]]:
    """All subsets of the models, small to large, in which each but the first can verify."""
    indices = range(len(models))
    subsets = (c for size in range(1, len(models) + 1) for c in itertools.combinations(indices, size))
    return [chain for chain in subsets if all(models[m].passes is not None for m in chain[1:])]


def candidates(models: Seq[Estimate], windows: Seq[int]) -> Iterator[ChainCandidate]:
    """Each chain with each window, so that no more than the greatest window is proposed to the target."""
    for chain in chains(models):
        for window in windows:
            if window + len(chain) - 1 <= windows[-1]:
                yield ChainCandidate(chain, window)


def best(
    replies: int, target: PassCost, models: Seq[Estimate], windows: Seq[int]
) -> tuple[ChainCandidate | None, float]:
    """The candidate with the most predicted tokens per second, and these. None, the target alone, wins ties."""
    every = (None, *candidates(models, windows))
    return max(((c, tokens_per_s(replies, target, models, c)) for c in every), key=lambda pair: pair[1])


class Chooser:
    """Chooses before each step, and decides when another chain is tried."""

    def __init__(self, target: PassCost, models: Seq[Estimate], max_window: int) -> None:
        """models: small to large."""
        self.target, self.models = target, list(models)
        self.prompts = 0.0
        """Tokens of prompts that come with each output token, on average over the replies."""
        self._windows = windows(max_window)
        self._credit_s = 0.0
        self._explored = 0
        self._tried: tuple[int, ...] = ()  # the chain that is tried until its drafts are made
        self._chosen_for = (0, 0)  # replies, and the steps for which the choice still holds
        self._lost_s = 0.0  # by the present chain, since another one leads
        self._known = dict[Hashable, float]()  # what follows from the present choice, until the next one
        self.current: ChainCandidate | None = None

    def choose(self, replies: int, missing: Callable[[int], int]) -> ChainCandidate | None:
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
        by_chain = self._best_windows(replies)
        if self.current is None or current < alone:
            self._switch(self._leader(replies, [c for rate, c in by_chain.values() if rate >= GAIN * alone]))
            return self.current
        leader = self._leader(replies, [c for rate, c in by_chain.values() if rate >= alone])
        rate, own = by_chain[self.current.chain]
        if leader is None or leader.chain == self.current.chain:
            self._lost_s = 0.0
        elif self._repays(replies, leader, own, CHOSEN_STEPS - steps, missing):
            self._switch(leader)
            return self.current
        if rate > WINDOW_GAIN * current:
            self._switch(own)
        return self.current

    def _repays(
        self, replies: int, leader: ChainCandidate, own: ChainCandidate, steps: int, missing: Callable[[int], int]
    ) -> bool:
        """Whether what the present chain has lost against another one is the price of the prompts that this one computes."""
        models = [model.upper() for model in self.models]
        present, other = (self._predicted(replies, candidate, models) for candidate in (own, leader))
        lost_s = present.seconds - present.tokens / other.tokens_per_s
        if other.tokens_per_s > WINDOW_GAIN * present.tokens_per_s:
            self._lost_s += steps * lost_s
        price_s = sum(self.models[m].cost.catch_up_s(missing(m)) for m in leader.chain if m not in own.chain)
        return self._lost_s > price_s

    def _switch(self, candidate: ChainCandidate | None) -> None:
        if candidate is None or self.current is None or candidate.chain != self.current.chain:
            self._lost_s = 0.0
        self.current = candidate

    def _predicted(
        self, replies: int, candidate: ChainCandidate | None, models: Seq[Estimate] | None = None
    ) -> ChainPrediction:
        return predicted(replies, self.target, models or self.models, candidate, self.prompts)

    def _rate(self, replies: int, candidate: ChainCandidate | None, models: Seq[Estimate] | None = None) -> float:
        return self._predicted(replies, candidate, models).tokens_per_s

    def _best_windows(self, replies: int) -> dict[tuple[int, ...], tuple[float, ChainCandidate]]:
        """By chain, the window with the most predicted tokens per second, and these."""
        result = dict[tuple[int, ...], tuple[float, ChainCandidate]]()
        for candidate in candidates(self.models, self._windows):
            rate = self._rate(replies, candidate)
            if candidate.chain not in result or rate > result[candidate.chain][0]:
                result[candidate.chain] = rate, candidate
        return result

    def _leader(self, replies: int, paying: Seq[ChainCandidate]) -> ChainCandidate | None:
        """Of one candidate per chain, the fastest if what little is known of a chain was bad luck; None of none."""
        if len(paying) < 2:
            return paying[0] if paying else None
        models = [model.upper() for model in self.models]
        return max(paying, key=lambda candidate: self._rate(replies, candidate, models))

    def pace(self, replies: int) -> DraftPace:
        """What a drafted token is worth and what it costs, on average over the window of the chain that drafts now, or of the
        best one while none does."""
        candidate = self.current
        if candidate is None:
            every = candidates(self.models, self._windows)
            candidate = max(every, key=lambda c: self._rate(replies, c), default=None)
        if candidate is None:
            return FIRST_PACE
        prediction = predicted(replies, self.target, self.models, candidate)
        length = candidate.window + len(candidate.chain) - 1
        return DraftPace(_share(prediction.tokens / replies, length), prediction.drafted_s / length)

    def least(self, replies: int) -> float:
        """The probability from which on one more token is worth its row in the pass and its drafting; 0 in a chain, whose
        tokens the next model verifies."""
        if self.current is None or len(self.current.chain) > 1:
            return 0.0
        if "least" not in self._known:
            estimate = self.models[self.current.last]
            most = replies * self._windows[-1]  # over the whole range, since measured points vary
            row_s = (self.target.seconds(replies, replies + most) - self.target.seconds(replies, replies)) / most
            rate = self._rate(replies, self.current)
            self._known["least"] = max(0.0, row_s + estimate.cost.token_s) * rate
        return self._known["least"]

    def explore(self, replies: int, missing: Callable[[Seq[int]], Seq[int]]) -> ChainCandidate | None:
        """A chain to try with one reply in the next step; None: none is to be tried, or it would cost too much.

        missing: the tokens that each of these models has to compute before it can draft for that reply.
        """
        if "step" not in self._known:
            self._known["step"] = self.target.seconds(replies, replies)
        step_s = self._known["step"]
        self._credit_s = min(MOST_CREDIT_STEPS * step_s, self._credit_s + EXPLORED_SHARE * step_s)
        present = self.current.chain if self.current is not None else ()
        others = [c for c in chains(self.models) if c != present and len(c) <= self._windows[-1]]
        if not others:
            return None
        if self._tried not in others:
            self._tried = self._next_tried(replies, others)
        chain = self._tried
        vain = self.models[chain[-1]].acceptance.in_vain // EXPLORED_DRAFTS
        window = 1 if vain else min(EXPLORED_WINDOW, self._windows[-1] - len(chain) + 1)
        tried = ChainCandidate(chain, window)
        if tried not in self._known:
            drafted_s = predicted(1, self.target, self.models, tried).drafted_s
            rows = replies + window + len(chain) - 1
            self._known[tried] = drafted_s + max(0.0, self.target.seconds(replies, rows) - step_s)
        price_s = self._known[tried]
        if price_s <= self._credit_s:
            counts = missing(chain)
            price_s += sum(self.models[m].cost.catch_up_s(n) for m, n in zip(chain, counts, strict=True))
        if price_s > self._credit_s:
            if price_s > MOST_CREDIT_STEPS * step_s:  # it cannot be saved up: another chain may cost less
                self._explored += EXPLORED_DRAFTS - self._explored % EXPLORED_DRAFTS
                self._tried = ()
            return None
        self._credit_s -= price_s * min(MOST_VAIN_PRICE, 2**vain)
        self._explored += 1
        if self._explored % EXPLORED_DRAFTS == 0:
            self._tried = ()
        return tried

    def _next_tried(self, replies: int, others: Seq[tuple[int, ...]]) -> tuple[int, ...]:
        """Of chains that do not draft: by turns each of them, and the one that may be the fastest."""
        turn, leading = divmod(self._explored // EXPLORED_DRAFTS, 2)
        if not leading or len(others) == 1:
            return others[turn % len(others)]
        leader = self._leader(replies, [c for _, c in self._best_windows(replies).values() if c.chain in others])
        return others[0] if leader is None else leader.chain

    def remove(self, model: int) -> None:
        """A model has failed; the indices of those after it change."""
        self.models = [estimate for i, estimate in enumerate(self.models) if i != model]
        for estimate in self.models:
            remaining = {i - (i > model): known for i, known in estimate.by.items() if i != model}
            estimate.by.clear()
            estimate.by.update(remaining)
        self.current, self._chosen_for, self._tried = None, (0, 0), ()
        self._known.clear()


def windows(max_window: int) -> list[int]:
    """The windows to choose from, up to `max_window`: the effect of one more token falls with their number."""
    return [w for w in (1, 2, 3, 5, 7, 11, 15) if w < max_window] + [max_window]
