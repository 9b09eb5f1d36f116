"""A cascade whose limits move with the load, in virtual time: all tiers together, with the functions that serve. No I/O.

Which tiers a request visits depends on what waits in all of them at that time, so tiers cannot be simulated one after
another. Requests are placed as routers place them, by what workers published last and what was sent since; so is the delay
known by which limits move.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.planner_service.question.site import Demand
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.cluster import Cluster
from penstock.planner_service.simulator.placed import STILL
from penstock.planner_service.simulator.policies import Dispatch
from penstock.planner_service.simulator.workload import Bools, Floats
from penstock.services.acceptance import pipeline
from penstock.services.acceptance.wait_price import Price, priced_to_accept, priced_to_ask
from penstock.services.domain.dispatch import REQUEST_TOKENS, delay_s
from penstock.types.plans import TierPlan

TICK_S = 0.1  # the view of a router is brought up to date as often
MOVES = replace(STILL, tick_s=TICK_S)
FREE = Price(0.0)


@dataclass(frozen=True, slots=True)
class PricedRouting:
    """tiers: all. price: of a second of delay; without points, load does not matter."""

    tiers: tuple[TierPlan, ...]
    price: Price = FREE


@dataclass(frozen=True, slots=True, eq=False)
class PricedRun:
    """total_s, quality (N): from a request's arrival to its answer, and its worth. visited (C, N): who visited each tier."""

    total_s: Floats
    quality: Floats
    visited: Bools


def simulate_priced(
    demand: Demand, routing: PricedRouting, replicas: Sequence[Sequence[Replica]], judge_s: float
) -> PricedRun:
    """Simulate, with predicted scores. replicas: by tier. judge_s: from the end of an answer to its score. Deterministic.

    Raises:
        InvalidRequest: A request is longer than a replica's KV.
    """
    return _Simulation(demand, routing, replicas, judge_s).run()


class _Dispatch(Dispatch):
    def delay_s(self, answer_tokens: float) -> float:
        """By which the pending work of the least busy instance delays an answer of so many tokens."""
        return min(
            delay_s(answer_tokens, self._prompt_tokens(i), self._pending(i), self._prompt_tokens_per_s)
            for i in range(self._cluster.instances)
        )


class _Simulation:
    def __init__(
        self, demand: Demand, routing: PricedRouting, replicas: Sequence[Sequence[Replica]], judge_s: float
    ) -> None:
        requests = demand.requests
        assert requests.predicted is not None
        self._requests, self._predicted, self._routing, self._judge_s = requests, requests.predicted, routing, judge_s
        self._arrival_s = demand.arrival_s - demand.arrival_s[0]
        works = [Workload(self._arrival_s, requests.input_tokens, tokens) for tokens in requests.output_tokens.T]
        self._clusters = [Cluster(work, of, MOVES) for work, of in zip(works, replicas, strict=True)]
        self._dispatches = [_Dispatch(cluster) for cluster in self._clusters]
        self._all = [[range(cluster.instances)] for cluster in self._clusters]
        self._last = len(replicas) - 1
        self._visited = np.zeros((len(replicas), len(requests)), np.bool_)
        self._done_s: Floats = np.zeros(len(requests))
        self._answered = np.full(len(requests), -1, np.int64)

    def run(self) -> PricedRun:
        count, coming, tick = len(self._requests), 0, 0
        publish_every = round(MOVES.publish_s / TICK_S)
        left = count
        while left:
            tick += 1
            until_s = tick * TICK_S
            while coming < count and self._arrival_s[coming] < until_s:
                self._ask(coming, 0, float(self._arrival_s[coming]))
                coming += 1
            for tier, cluster in enumerate(self._clusters):
                for request in cluster.advance(until_s):
                    left -= self._finished(request, tier, float(cluster.finish_s[request]))
            if tick % publish_every == 0:
                for dispatch in self._dispatches:
                    dispatch.publish()
        quality = self._requests.quality[np.arange(count), self._answered]
        return PricedRun(self._done_s - self._arrival_s, quality, self._visited)

    def _ask(self, request: int, tier: int, at_s: float) -> None:
        """The request goes to the first tier from this one on that is not passed over."""
        while tier < self._last and self._passes_over(request, tier):
            tier += 1
        self._visited[tier, request] = True
        self._clusters[tier].send(request, self._dispatches[tier].place(request, self._all[tier]), at_s)

    def _passes_over(self, request: int, tier: int) -> bool:
        rules, predicted = self._routing.tiers[tier], float(self._predicted[request, tier])
        if self._routing.price.per_s:
            own_s, next_s = (self._dispatches[at].delay_s(REQUEST_TOKENS) for at in (tier, tier + 1))
            rules = priced_to_ask(rules, predicted, self._routing.price, own_s, next_s)
        names = (one.name for one in self._routing.tiers)
        return not pipeline.is_asked(rules, dict(zip(names, self._predicted[request].tolist(), strict=True)))

    def _finished(self, request: int, tier: int, at_s: float) -> bool:
        """Whether the answer is accepted; else the request escalates."""
        if tier < self._last:
            at_s += self._judge_s
            if not self._accepted(request, tier):
                self._ask(request, tier + 1, at_s)
                return False
        self._done_s[request], self._answered[request] = at_s, tier
        return True

    def _accepted(self, request: int, tier: int) -> bool:
        rules, tokens = self._routing.tiers[tier], int(self._requests.output_tokens[request, tier])
        if self._routing.price.per_s:
            rules = priced_to_accept(rules, self._routing.price, self._dispatches[tier + 1].delay_s(tokens))
        score = float(self._requests.scores[request, tier])
        return pipeline.decide(rules, score, tokens).accepted
