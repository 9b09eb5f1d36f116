"""Drafted tokens in steps of virtual time, compiled: what they cost, how many are worth it, which are accepted. No I/O.

A step drafts a window of tokens for each of its decodes, by as many passes of a small model, and verifies them with the
token that it computes anyway: each window adds its tokens to the step, while the context of a reply is read once. Of a window
those before the first wrong one are accepted. Whether a drafted token is accepted depends on the request and its place
in the reply alone, so that all policies get the same drafts.
"""

from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator.batch_step import Engine
from penstock.planner_service.simulator.speculation import MAX_WINDOW, SimulatedDrafter
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import StepModel, base_s

Steps = Engine | StepModel

CATCH_UP_BATCH = 64  # rows between which a drafter's time per row is taken


class Drafts(NamedTuple):
    """acceptance: the probability that a drafted token is accepted if those before it are. max_window: 0 for no drafts.

    A pass of the drafter with n replies takes fixed_s + n * reply_s + context_token_s for each token of their contexts.
    """

    acceptance: float
    max_window: int
    fixed_s: float
    reply_s: float
    context_token_s: float


NO_DRAFTS = Drafts(0.0, 0, 0.0, 0.0, 0.0)


def drafts_of(drafter: SimulatedDrafter | None, max_window: int = MAX_WINDOW) -> Drafts:
    """What a drafter means for steps; NO_DRAFTS for none."""
    if drafter is None:
        return NO_DRAFTS
    latency = drafter.latency
    one_s, many_s = latency.base_s(1), latency.base_s(CATCH_UP_BATCH)
    reply_s = max(0.0, many_s - one_s) / (CATCH_UP_BATCH - 1)
    return Drafts(drafter.acceptance, max_window, one_s - reply_s, reply_s, latency.context_token_s)


@compiled()
def window_s(window: int, tokens: int, decodes: int, context: float, model: Steps, drafts: Drafts) -> float:
    """By how much a step of so many tokens takes longer with such a window for each of its decodes.

    context: of the decodes together. model: verifies. A verified token attends to the whole context of its reply.
    """
    more = window * decodes
    verifying_s = base_s(tokens + more, model) - base_s(tokens, model)
    verifying_s = verifying_s + model.context_token_s * more + model.pair_s * window * context
    drafting_s = window * (drafts.fixed_s + drafts.reply_s * decodes + drafts.context_token_s * context)
    return float(verifying_s + drafting_s)


@compiled()
def best_window(
    took_s: float, tokens: int, decodes: int, context: float, room: int, model: Steps, drafts: Drafts
) -> int:
    """The window that brings most tokens per second, in a step that takes `took_s` without one and has room for so many more
    tokens; 0 where drafts do not pay.

    With acceptance a, a window of w brings 1 + a + a^2 + ... + a^w tokens of each reply.
    """
    best, best_per_s, expected, share = 0, 1.0 / took_s, 1.0, 1.0
    for window in range(1, drafts.max_window + 1):
        if window * decodes > room:
            break
        share *= drafts.acceptance
        expected += share
        more_s = window_s(window, tokens, decodes, context, model, drafts)
        if expected / (took_s + more_s) > best_per_s:
            best, best_per_s = window, expected / (took_s + more_s)
    return best


@compiled()
def standing(request: int, position: int, window: int, acceptance: float) -> int:
    """How many of the tokens are accepted that are drafted for a reply from output position `position` on."""
    count = 0
    while count < window and _uniform(request, position + count) < acceptance:
        count += 1
    return count


@compiled()
def _uniform(request: int, position: int) -> float:
    """A number from 0 to 1 for a place of a request: SplitMix64's finaliser (Steele and others, 2014)."""
    x = np.uint64(request) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return float(x >> np.uint64(11)) * 2.0**-53
