"""Placement that knows something about reply lengths: what `known_lengths` compares with Penstock's own.

A source of lengths says how many tokens a reply still has: by the mean, by the distribution of other replies, or exactly. A
policy uses it: the work of a request is added to what `services.domain.dispatch` counts, or each instance is run ahead.
"""

import copy
import enum
from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner_service.simulator import instance_kernel
from penstock.planner_service.simulator.cluster import Cluster
from penstock.planner_service.simulator.policies import Dispatch, LeastWork, Policy
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.dispatch import REQUEST_TOKENS

AHEAD_S = 0.5
"""An instance is run ahead for so long at first, then for twice as long each time, until the request has ended."""


class LengthSource:
    """What is known about the output tokens that requests still have."""

    def left(self, requests: Ints, produced: Ints) -> Floats:
        """(N) expected tokens still to come of requests that have produced so many."""
        raise NotImplementedError

    def overlap(self, requests: Ints, produced: Ints, new: int) -> Floats:
        """(N) expected tokens that they and a new request produce in the same steps."""
        own = self.left(np.array([new]), np.zeros(1, np.int64))
        return np.minimum(self.left(requests, produced), own)


class MeanLength(LengthSource):
    """Every reply is as long as the mean of others; one that is longer ends with its next token."""

    def __init__(self, lengths: Ints) -> None:
        self._mean = float(lengths.mean())

    def left(self, requests: Ints, produced: Ints) -> Floats:
        return np.asarray(np.maximum(1.0, self._mean - produced))


class LengthDistribution(LengthSource):
    """Replies are distributed as others; of one that has produced some tokens, as those of the others that were longer.

    One that is longer than all others ends with its next token.
    """

    def __init__(self, lengths: Ints) -> None:
        longest = int(lengths.max())
        longer = 1.0 - np.cumsum(np.bincount(lengths, minlength=longest + 1)) / len(lengths)
        self._longer = np.maximum(longer[:longest], 0.0)  # (T) the share with more than t tokens
        still = np.cumsum(self._longer[::-1])[::-1]
        both = np.correlate(self._longer, self._longer, "full")[longest - 1 :]
        self._left, self._overlap = still / self._longer, both / self._longer

    def left(self, requests: Ints, produced: Ints) -> Floats:
        return self._of(self._left, produced)

    def overlap(self, requests: Ints, produced: Ints, new: int) -> Floats:
        return self._of(self._overlap, produced)

    def _of(self, table: Floats, produced: Ints) -> Floats:
        return np.where(produced < len(table), table[np.minimum(produced, len(table) - 1)], 1.0)


class ExactLength(LengthSource):
    """Every length is known: no distribution can do better. lengths (R): of the requests that are served."""

    def __init__(self, lengths: Ints) -> None:
        self._lengths = lengths

    def left(self, requests: Ints, produced: Ints) -> Floats:
        return np.asarray(self._lengths[requests] - produced, np.float64)


class Form(enum.Enum):
    """How placement uses lengths.

    ADDED: the tokens that an instance still has to produce are added to its work. OVERLAP: in place of `REQUEST_TOKENS`, a
    request counts with the tokens that it and the new one produce in the same steps. FORESIGHT: each instance is run ahead
    from its present state, and the new request goes where it ends first; no router has that state.
    """

    ADDED = "added"
    OVERLAP = "overlap"
    FORESIGHT = "foresight"


class LengthDispatch(Dispatch):
    """Dispatch by pending work with lengths. Instances publish what they hold as often as their work."""

    def __init__(self, cluster: Cluster, source: LengthSource, form: Form) -> None:
        super().__init__(cluster)
        self._source, self._form, self._new = source, form, 0
        none = np.zeros(0, np.int64)
        self._held = [(none, none)] * cluster.instances  # requests, and what they had produced

    def publish(self) -> None:
        super().publish()
        cluster = self._cluster
        for i in range(cluster.instances):
            requests = np.concatenate([cluster.running(i), cluster.waiting(i)])
            self._held[i] = requests, cluster.length[requests] - cluster.work.input_tokens[requests]

    def place(self, request: int, stages: Sequence[Sequence[int]]) -> int:
        self._new = request
        best = super().place(request, stages)
        requests, produced = self._held[best]
        self._held[best] = np.append(requests, request), np.append(produced, 0)
        return best

    def _pending(self, i: int) -> float:
        requests, produced = self._held[i]
        if self._form is Form.ADDED:
            return super()._pending(i) + float(self._source.left(requests, produced).sum())
        together = float(self._source.overlap(requests, produced, self._new).sum())
        return super()._pending(i) - REQUEST_TOKENS * len(requests) + together


class KnownLengths(LeastWork):
    """To the instance with the least pending work, lengths included."""

    def __init__(self, cluster: Cluster, source: LengthSource, form: Form) -> None:
        super().__init__(cluster)
        self._dispatch = LengthDispatch(cluster, source, form)


class ForkingCluster(Cluster):
    """A cluster whose instances can be run ahead without a change to them."""

    def end_s(self, request: int, instance: int, at_s: float, output_tokens: Ints) -> float:
        """When a request would end at an instance if no other came. output_tokens (R): taken for the lengths of all."""
        fork = copy.deepcopy(self.parts[instance])
        requests = copy.deepcopy(self._requests)._replace(output=output_tokens)
        ended = np.zeros(len(self.work), np.int64)
        engine = next(engine for alike, engine in self._engines if instance in alike)
        instance_kernel.put_in(fork, request, at_s)
        ahead_s = AHEAD_S
        while not requests.finish_s[request]:
            instance_kernel.advance(at_s + ahead_s, fork, engine, self.work.priority, requests, ended)
            ahead_s *= 2
        return float(requests.finish_s[request])


class Foresight(Policy):
    """To the instance where the request would end first if no other came and replies were as long as a source expects."""

    def __init__(self, cluster: ForkingCluster, source: LengthSource) -> None:
        super().__init__(cluster)
        self._forks, self._source = cluster, source

    def place(self, request: int) -> int:
        work, instances = self.cluster.work, self.cluster.instances
        at_s = float(work.arrival_s[request] - work.arrival_s[0])
        produced = self.cluster.length - work.input_tokens
        left = self._source.left(np.arange(len(work)), produced)
        output = produced + np.maximum(1, np.rint(left)).astype(np.int64)
        in_turn = [(request + i) % instances for i in range(instances)]
        return min(in_turn, key=lambda i: self._forks.end_s(request, i, at_s, output))


def policy_of(source: LengthSource, form: Form) -> Callable[[Cluster], Policy]:
    """A policy for `serve_on`; FORESIGHT needs a ForkingCluster."""

    def policy(cluster: Cluster) -> Policy:
        if form is not Form.FORESIGHT:
            return KnownLengths(cluster, source, form)
        assert isinstance(cluster, ForkingCluster)
        return Foresight(cluster, source)

    return policy
