"""What passes cost and how far drafts are accepted, measured while they run. No I/O."""

import bisect
import math
from collections.abc import Mapping

MEMORY = 16
"""Verified drafts after which an older one counts for about a third, where the share changes."""
STEADY = 64
"""While the last drafts are as those before them, the memory is so many times longer: two models may be nearly equal."""
CHANGED = 6.0
"""They are not where their share differs by three and a half standard deviations: an average over the last m drafts has the
variance of one draft over 2 m. The larger variance of both counts, because a run of misses is not rare where few are."""
MIN_VARIANCE = 0.02
REPLIES_PER_MEMORY = 4
"""In larger batches a step verifies many drafts; the memory grows so that one step does not replace all that is known."""
PRIOR = 0.8
"""Share of tokens expected to be accepted before any was verified: a drafter is worth a try."""
PRIOR_DRAFTS = 4
DOUBT = 1.0
"""Standard errors by which a share may be higher than measured, where chains are compared that pay."""
SMOOTHING = 0.1
"""Weight of one measured duration against those before it."""
PASS_NOISE, POINT_DOUBT, POINT_DRIFT, PACE_DRIFT = 0.04, 0.01, 1e-5, 4e-4
"""Variances of logarithms: of one pass by chance, of a point as measured at the start, and what each pass adds to what is not
known of a point and of the machine's pace."""
MOST_CHANGE = 2.0
"""A duration that differs from its prediction by more than this factor counts as this factor: a step may be interrupted."""


class Acceptance:
    """How far the drafts of one model are accepted, by position.

    A draft may end before its window, where its own model is unsure, so three shares are measured at each position: of the
    drafts that are accepted so far, those that have a token there which is accepted; of those with a token there, those
    whose token is accepted; and of all drafts, those that have a token there.
    """

    def __init__(self, max_window: int) -> None:
        self.max_window = max_window
        self._standing = [PRIOR] * max_window
        self._length = [1.0] * max_window
        self._drafts = [PRIOR_DRAFTS] * max_window
        self._recent = [PRIOR] * max_window  # as `_standing`, of the last drafts
        self._share = [PRIOR] * max_window  # as `_standing`, of the drafts that have a token there
        self._tokens = [PRIOR_DRAFTS] * max_window
        self.in_vain = 0
        """Drafts in a row of which nothing is accepted."""

    @classmethod
    def known(cls, share: float, max_window: int) -> "Acceptance":
        """Of a model whose tokens are accepted with this probability at every position, and whose drafts never end early."""
        acceptance = cls(max_window)
        acceptance._standing = [share] * max_window
        acceptance._share = [share] * max_window
        return acceptance

    def observe(self, window: int, verified: int, accepted: int, replies: int) -> None:
        """A draft for `window` tokens had `verified`, none if it ended at once, of which `accepted` were right.

        replies: of the step.
        """
        self.in_vain = 0 if accepted else self.in_vain + 1
        memory = MEMORY * max(1, replies // REPLIES_PER_MEMORY)
        steady, follows = STEADY * memory, 2 / (memory + 1)
        for i in range(window):
            drafts = self._drafts[i]
            recently = 1 / (min(memory, drafts) + 1)
            self._length[i] += recently * ((verified > i) - self._length[i])
            if accepted < i:  # not reached, so that what is known of it is old: it follows the position before it
                self._standing[i] += follows * (self._standing[i - 1] - self._standing[i])
                self._share[i] += follows * (self._share[i - 1] - self._share[i])
                continue
            stands, standing = accepted > i, self._standing[i]
            self._recent[i] += recently * (stands - self._recent[i])
            recent = self._recent[i]
            variance = max(MIN_VARIANCE, standing * (1 - standing), recent * (1 - recent))
            if (recent - standing) ** 2 > CHANGED * variance * recently:
                self._standing[i], self._drafts[i] = self._recent[i], min(drafts, memory // 2) + 1
                self._share[i], self._tokens[i] = self._recent[i], min(self._tokens[i], memory // 2)
            else:
                self._standing[i] += (stands - standing) / (min(steady, drafts) + 1)
                self._drafts[i] += 1
            if verified > i:
                self._share[i] += (stands - self._share[i]) / (min(steady, self._tokens[i]) + 1)
                self._tokens[i] += 1
        if accepted == window:  # beyond the window, nothing is known but that drafts come so far: it follows, slowly
            for i in range(max(1, window), self.max_window):
                for shares in (self._standing, self._share):
                    shares[i] += (shares[i - 1] - shares[i]) / memory

    def share(self, position: int) -> float:
        """Of the drafts that are accepted before a position and have a token there, those whose token there is accepted."""
        return self._share[position]

    def upper(self) -> "Acceptance":
        """The same drafts with the shares that they may well have: the less is known, the more above those measured."""
        optimistic = Acceptance(self.max_window)
        optimistic._standing = list(map(_upper, self._standing, self._drafts))
        optimistic._share = list(map(_upper, self._share, self._tokens))
        optimistic._length = self._length
        return optimistic

    def tokens(self, window: int) -> float:
        """Expected tokens of a pass: the accepted ones and the verifier's own after them.

        With one share a at all positions, this is (1 - a^(window + 1)) / (1 - a), the sum of a geometric series;
        SpecRouter's equation 3 adds the verifier's own token a second time.
        """
        total, reached = 1.0, 1.0
        for share in self._standing[:window]:
            reached *= share
            total += reached
        return total

    def drafted(self, window: int) -> float:
        """Expected length of a draft."""
        return sum(self._length[:window])


class PassCost:
    """Seconds of a pass by its replies and its rows (tokens), from measured points, corrected while it runs.

    What else a machine does makes all passes slower or faster, so a pass that takes longer than predicted says something
    of the others, too: else those that are not made would look ever better while it slows down. How much is the machine's
    pace and how much the point's own error is told apart by a Kalman filter on logarithms, without covariances.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        """measured: seconds by (replies, tokens per reply). Each number of replies has the same numbers of tokens."""
        self._replies = sorted({replies for replies, _ in measured})
        self._widths = sorted({width for _, width in measured})
        self._points = dict(measured)
        if len(self._points) != len(self._replies) * len(self._widths):
            raise ValueError("every number of replies needs every number of tokens per reply")
        self._pace, self._pace_doubt = 1.0, 0.0
        self._doubt = dict.fromkeys(self._points, POINT_DOUBT)

    def seconds(self, replies: int, rows: float) -> float:
        """Duration of a pass with `rows` tokens for `replies` replies, linear between the measured points and beyond. More
        replies than were measured cost what their rows would cost for fewer."""
        return self._pace * self._interpolated(*self._priced_as(replies, rows))

    def observe(self, replies: int, rows: int, seconds: float) -> None:
        """A pass took so long."""
        error = math.log(max(1e-9, seconds) / self.seconds(replies, rows))
        error = min(math.log(MOST_CHANGE), max(-math.log(MOST_CHANGE), error))
        replies, width = self._priced_as(replies, rows)
        near = self._replies[_nearest(self._replies, replies)], self._widths[_nearest(self._widths, width)]
        total = self._pace_doubt + self._doubt[near] + PASS_NOISE
        of_pace, of_point = self._pace_doubt / total, self._doubt[near] / total
        self._pace *= math.exp(of_pace * error)
        self._points[near] *= math.exp(of_point * error)
        self._pace_doubt = (1 - of_pace) * self._pace_doubt + PACE_DRIFT
        self._doubt[near] = (1 - of_point) * self._doubt[near] + POINT_DRIFT

    def _priced_as(self, replies: int, rows: float) -> tuple[int, float]:
        """(replies, rows of each) that cost as much: no more replies than were measured."""
        replies = min(replies, self._replies[-1])
        return replies, rows / replies

    def _interpolated(self, replies: int, width: float) -> float:
        points = self._points
        at, share = _place(self._replies, replies)
        i, part = _place(self._widths, width)
        low, high = self._replies[at], self._replies[min(at + 1, len(self._replies) - 1)]
        narrow, wide = self._widths[i], self._widths[min(i + 1, len(self._widths) - 1)]
        first = points[low, narrow] + part * (points[low, wide] - points[low, narrow])
        second = points[high, narrow] + part * (points[high, wide] - points[high, narrow])
        return max(1e-9, first + share * (second - first))


class DraftCost:
    """Seconds of drafting, and of catching up.

    Drafting has a fixed part, and parts per reply, per step (a token for each reply) and per token; catching up has one per
    token. A loop that drafts one reply after the other costs nothing per step, a batch on a GPU next to nothing per token.
    """

    def __init__(
        self, *, fixed_s: float, reply_s: float, step_s: float, token_s: float, catch_up_token_s: float
    ) -> None:
        self.fixed_s, self.reply_s, self.step_s, self.token_s = fixed_s, reply_s, step_s, token_s
        self.catch_up_token_s = catch_up_token_s
        self._factor = 1.0

    def seconds(self, replies: int, tokens: float) -> float:
        """Duration of drafting so many tokens in all, for so many replies."""
        return self._factor * self._measured(replies, tokens)

    def catch_up_s(self, tokens: float) -> float:
        """Duration of computing so many tokens of a prompt, as it was measured: `observe` sees drafting alone."""
        return self.catch_up_token_s * tokens

    def observe(self, replies: int, tokens: int, seconds: float) -> None:
        """Drafting so many tokens for so many replies took so long."""
        ratio = seconds / self._measured(replies, tokens)
        ratio = min(self._factor * MOST_CHANGE, max(self._factor / MOST_CHANGE, ratio))
        self._factor += SMOOTHING * (ratio - self._factor)

    def _measured(self, replies: int, tokens: float) -> float:
        steps = tokens / replies
        return max(1e-9, self.fixed_s + self.reply_s * replies + self.step_s * steps + self.token_s * tokens)


def _upper(share: float, drafts: float) -> float:
    """A share of so many drafts, `DOUBT` standard errors higher."""
    return min(1.0, share + DOUBT * math.sqrt(max(MIN_VARIANCE, share * (1 - share)) / drafts))


def _place(points: list[int], x: float) -> tuple[int, float]:
    """The piece between two points that x is in, or the first or last one, and the share of the piece that is below x."""
    if len(points) == 1:
        return 0, 0.0
    at = min(max(1, bisect.bisect_left(points, x)), len(points) - 1) - 1
    return at, (x - points[at]) / (points[at + 1] - points[at])


def _nearest(points: list[int], x: float) -> int:
    """The index of the point next to x."""
    at, share = _place(points, x)
    return min(at + (share > 0.5), len(points) - 1)
