"""Length stages in a simulated cluster, decided by the code that serves: `services.domain.stages` and `dispatch`. No I/O."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.planner_service.simulator.cluster import Cluster, Transfer
from penstock.planner_service.simulator.policies import Dispatch, Policy
from penstock.services.domain.errors import invalid
from penstock.services.domain.stages.bidding import Ask, Bid, Go, Receiver, Sender, TransferSlots, choose
from penstock.services.domain.stages.layout import StageLayout
from penstock.services.domain.stages.overload import excess_tokens, to_hand_over
from penstock.services.domain.stages.places import by_preference, outgrown_to, peers, successors
from penstock.services.domain.stages.qoe import BatchLoad, InFlight
from penstock.services.domain.stages.refinement import averaged, refine
from penstock.services.domain.stages.worth import worth_moving
from penstock.types.mesh_status import StagePlace
from penstock.types.plans import QoeModel


class Staged(Policy):
    """CascadeInfer: stages by length, boundaries refined, bid-ask between and within stages."""

    def __init__(self, cluster: Cluster, layout: StageLayout, qoe: QoeModel) -> None:
        super().__init__(cluster)
        if layout.instances != cluster.instances:
            raise invalid("layout", f"holds {layout.instances} instances, the cluster {cluster.instances}")
        self._layout, self._qoe = layout, qoe
        self._names = [f"{i:04}" for i in range(cluster.instances)]
        self._number = {name: i for i, name in enumerate(self._names)}
        self._places: dict[str, StagePlace] = {}
        for i, name in enumerate(self._names):
            stage = layout.stage_of_instance(i)
            self._places[name] = StagePlace(stage, layout.stages[stage].from_tokens, layout.stages[stage].to_tokens)
        self._look_around()
        self._boundary = [float(self._place_of(i).to_tokens) for i in range(cluster.instances)]
        slots = [TransferSlots() for _ in self._names]
        self._senders = [Sender(slot) for slot in slots]
        self._receivers = [Receiver(name, slot) for name, slot in zip(self._names, slots, strict=True)]
        self._target: dict[int, int] = {}  # of requests that are won or on their way
        self._load = [0] * cluster.instances  # tokens of the requests there, as published
        self._batch = [BatchLoad()] * cluster.instances  # the same, as the QoE model sees them
        self._dispatch = Dispatch(cluster)
        self._refined_s = 0.0
        self._throughput = cluster.moves.bandwidth_bytes_per_s / max(cluster.moves.kv_bytes_per_token, 1e-9)

    def place(self, request: int) -> int:
        """As the router does."""
        tokens = int(self.cluster.work.input_tokens[request])
        groups = [[self._number[name] for name in group] for group in by_preference(self._places, tokens)]
        covering = [group for group in groups if tokens < self._place_of(group[0]).to_tokens]
        return self._dispatch.place(request, covering or groups)

    def publish(self) -> None:
        cluster = self.cluster
        self._dispatch.publish()
        held = [cluster.held(i) for i in range(cluster.instances)]
        self._load = [sum(s.tokens for s in one) for one in held]
        self._batch = [BatchLoad.of(one) for one in held]
        if cluster.now_s - self._refined_s >= cluster.moves.refine_s:
            self._refined_s = cluster.now_s
            self._refine(held)

    def tick(self, ended: Sequence[int], completed: Sequence[tuple[Transfer, bool]]) -> None:
        for transfer, _ in completed:
            self._forget(transfer.request, transfer.source)
        moving = {t.request for t in self.cluster.transfers}
        for request in ended:
            if request in self._target and request not in moving:
                self._forget(request, int(self.cluster.home[request]))
        for source in self.cluster.busy():
            self._ask_for(source)
        self._start_transfers()

    def _place_of(self, i: int) -> StagePlace:
        return self._places[self._names[i]]

    def _refine(self, held: list[list[InFlight]]) -> None:
        stages = self._layout.stages
        boundary = list(self._boundary)
        for i, others in enumerate(self._others):
            place = self._place_of(i)
            after = successors(others, place.stage)
            if not after:
                continue
            boundary[i] = refine(
                self._boundary[i],
                held[i],
                averaged([held[self._number[n]] for n in after]),
                self._qoe,
                least=place.from_tokens + 1,
                most=stages[place.stage + 1].to_tokens - 1,
            )
        self._boundary = boundary
        for i, name in enumerate(self._names):
            self._places[name] = replace(self._place_of(i), to_tokens=round(boundary[i]))
        self._look_around()

    def _look_around(self) -> None:
        """Of each instance, the others' places and the others of its stage: asked for at every tick, changed by few."""
        self._others = [{n: p for n, p in self._places.items() if n != name} for name in self._names]
        self._beside = [peers(others, self._place_of(i).stage) for i, others in enumerate(self._others)]

    def _ask_for(self, source: int) -> None:
        """Ask for every request that has outgrown this instance, and for one if it is its stage's outlier."""
        cluster, place, sender = self.cluster, self._place_of(source), self._senders[source]
        movable = [r for r in cluster.decoding(source).tolist() if r not in self._target]
        for r in movable:
            tokens = int(cluster.length[r])
            able = outgrown_to(self._others[source], place.stage, tokens) if tokens >= place.to_tokens else []
            if able and self._worth(r, source, able):
                self._ask(r, source, able)
        if not movable:
            return
        beside = self._beside[source]
        excess = excess_tokens(self._load[source] - sender.tokens, [self._load[self._number[n]] for n in beside])
        if not excess:
            return
        left = {str(r): int(cluster.length[r]) for r in movable if r not in self._target}
        chosen = to_hand_over(left, excess)
        if chosen is not None and self._worth(int(chosen), source, beside):
            self._ask(int(chosen), source, beside)

    def _worth(self, request: int, source: int, candidates: Sequence[str]) -> bool:
        cluster = self.cluster
        sequence = InFlight(int(cluster.length[request]), int(cluster.work.input_tokens[request]))
        there = [self._batch[self._number[name]] for name in candidates]
        takes_s = cluster.moves.transfer_s(sequence.tokens)
        return worth_moving(sequence, self._batch[source], there, self._qoe, takes_s)

    def _ask(self, request: int, source: int, candidates: Sequence[str]) -> None:
        cluster, name = self.cluster, str(request)
        tokens = int(cluster.length[request])
        self._senders[source].offer(name, tokens)
        ask = Ask(name, self._names[source], tokens, self._senders[source].tokens)
        answers = [
            self._receivers[i].bid(
                ask, load_tokens=self._load[i], idle_tokens=cluster.free_tokens(i), tokens_per_s=self._throughput
            )
            for i in [self._number[candidate] for candidate in candidates]
        ]
        chosen = choose([answer for answer in answers if isinstance(answer, Bid)])
        target = None if chosen is None else self._number[chosen.receiver_id]
        if target is None or self._receivers[target].confirm(ask, idle_tokens=cluster.free_tokens(target)) is not None:
            self._senders[source].ended(name)
            return
        self._target[request] = target
        self._load[target] += tokens
        self._load[source] -= tokens

    def _start_transfers(self) -> None:
        for i, receiver in enumerate(self._receivers):
            receiver.look_again()
            while (turn := receiver.next()) is not None:
                request, source = int(turn.ask.request_id), self._number[turn.ask.sender_id]
                go = self._senders[source].start(turn.ask.request_id, starving=turn.starving)
                if go is Go.NOW:
                    self._begin(request, source, i)
                elif go is Go.BUSY:
                    receiver.sender_busy(turn.ask.request_id)
        for source, sender in enumerate(self._senders):
            while (name := sender.next()) is not None:
                self._begin(int(name), source, self._target[int(name)])

    def _begin(self, request: int, source: int, target: int) -> None:
        if self.cluster.length[request] >= self.cluster.free_tokens(target):  # taken meanwhile: it stays
            self._forget(request, source)
            return
        self._receivers[target].started(str(request))
        self.cluster.start_move(request, source, target)

    def _forget(self, request: int, source: int) -> None:
        target = self._target.pop(request)
        self._senders[source].ended(str(request))
        self._receivers[target].ended(str(request))
