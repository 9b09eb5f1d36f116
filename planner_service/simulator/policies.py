"""Where the requests of a simulated cluster go, and when they move on. No I/O.

`LeastWork` places by the code that serves, `services.domain.dispatch`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.planner_service.simulator.cluster import Cluster, Transfer
from penstock.services.domain.dispatch import NOTHING_SENT, Sent, sent_tokens, stage_for, wait_s, work_tokens
from penstock.services.domain.latency import StepLoad


class Policy:
    """Where requests go and what moves. `publish` comes every publish_s, `tick` every tick_s."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def place(self, request: int) -> int:
        """The instance of a request that has just arrived."""
        raise NotImplementedError

    def publish(self) -> None:
        """Instances tell each other what they hold."""

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        """After all instances have run up to now."""


class PublishedWork(NamedTuple):
    """What an instance published about its pending work, as a worker's record has it."""

    prompt_tokens: int = 0
    requests: int = 0
    context_tokens: int = 0


class Dispatch:
    """Places requests by the pending work that instances published, and by what was sent to them since."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._work = [PublishedWork()] * cluster.instances
        self._sent = [NOTHING_SENT] * cluster.instances
        replica = cluster.replica
        chunk = replica.limits.max_step_tokens
        step_s = replica.latency.step_s(StepLoad(chunk, chunk, chunk * (chunk + 1) / 2, requests=1))
        self._prompt_tokens_per_s = chunk / step_s if step_s > 0 else 0.0

    def publish(self) -> None:
        """Take over what all instances have to do now."""
        self._work = [PublishedWork(*pending) for pending in self._cluster.pending_work().tolist()]
        self._sent = [NOTHING_SENT] * self._cluster.instances

    def place(self, request: int, stages: Sequence[Sequence[int]]) -> int:
        """The instance for a new request. stages: the instances of the stages that cover its length, the earliest first."""
        stage = stages[stage_for([min(map(self._wait_s, stage)) for stage in stages])] if len(stages) > 1 else stages[0]
        instances = self._cluster.instances
        best = min(stage, key=lambda i: (self._pending(i), (i - request) % instances))
        tokens, sent = int(self._cluster.work.input_tokens[request]), self._sent[best]
        self._sent[best] = Sent(sent.requests + 1, sent.tokens + tokens)
        return best

    def _pending(self, i: int) -> float:
        return work_tokens(*self._work[i]) + sent_tokens(self._sent[i])

    def _wait_s(self, i: int) -> float:
        return wait_s(self._prompt_tokens(i), self._prompt_tokens_per_s)

    def _prompt_tokens(self, i: int) -> int:
        return self._work[i].prompt_tokens + self._sent[i].tokens


class LeastWork(Policy):
    """To the instance with the least pending work, as in a tier without stages; nothing moves."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._dispatch = Dispatch(cluster)
        self._all = [range(cluster.instances)]

    def place(self, request: int) -> int:
        return self._dispatch.place(request, self._all)

    def publish(self) -> None:
        self._dispatch.publish()
