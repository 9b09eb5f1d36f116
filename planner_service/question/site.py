"""What a cascade is planned for: where it is to run, and what it is to serve. No I/O."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.planner_service.routing.grading import Grading
from penstock.planner_service.routing.quality import JudgedSample, routed_sample
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.planner_service.simulator.judged import has_one_batch
from penstock.planner_service.simulator.remote import RemoteTier
from penstock.planner_service.simulator.speculation import MAX_WINDOW, SimulatedDrafter, speculating_latency
from penstock.planner_service.simulator.workload import Floats
from penstock.services.acceptance.judged import GivenDrafts
from penstock.services.domain.errors import invalid
from penstock.services.domain.hardware import (
    ClusterSpec,
    ModelSpec,
    ReplicaShape,
    Runtime,
    expert_parallelism_problem,
    fit,
    roofline,
)
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.rules import AcceptanceRules

MOST_VERIFIED = 16  # tokens of a draft in a pass
PIPELINES = (1, 2, 3, 4, 6, 8)

_Value = TypeVar("_Value")

ONE_GPU = "the engine that drafts runs a replica on one GPU"
DRAFT_RUNTIME = Runtime(step_overhead_s=0.0005)
"""Of a drafter, whose steps do nothing else than compute the next token of a batch."""


@dataclass(frozen=True, slots=True)
class TierSpeculation:
    """What drafts for a tier. drafters: models, small to large, each with the probability that the tier's model draws its
    token as well. context_tokens: of a reply, for which the chain and the window are chosen."""

    drafters: tuple[tuple[ModelSpec, float], ...] = ()
    max_window: int = MAX_WINDOW
    context_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Site:
    """Where a cascade is to run. models: by tier, in the cascade's order. judge_s: seconds to judge one answer; with
    `grading`, the load of what judges, in addition to the wait for its grade.

    cluster: the GPUs of the first type. more: those of further types, each with a name; no replica spans two types.
    measured: by tier, replicas whose step times were measured; a tier that has some uses only those, else a roofline.
    speculation: by tier, what drafts for it; empty for none at all. Profiles have it already.
    remotes: by tier, the API that serves it instead of GPUs; empty where none is remote.
    draft_acceptance: by tier, of the next token of a rejected answer, see GivenDrafts; 0 where drafts are not counted.
    drafts_on_many: whether replicas of several GPUs take rejected answers as drafts, as no engine of ours does.
    one_batch: whether replicas must have one batch, as those that keep SLOs.
    """

    cluster: ClusterSpec
    tiers: tuple[str, ...]
    models: tuple[ModelSpec, ...]
    runtime: Runtime = field(default_factory=Runtime)
    limits: EngineLimits = field(default_factory=EngineLimits)
    judge_s: float = 0.0
    measured: tuple[tuple[Replica, ...], ...] = ()
    more: tuple[ClusterSpec, ...] = ()
    speculation: tuple[TierSpeculation, ...] = ()
    grading: Grading | None = None
    remotes: tuple[RemoteTier | None, ...] = ()
    one_batch: bool = False
    draft_acceptance: tuple[float, ...] = ()
    drafts_on_many: bool = False

    @property
    def types(self) -> tuple[ClusterSpec, ...]:
        """The GPUs by type."""
        return (self.cluster, *self.more)

    @property
    def gpus(self) -> int:
        return sum(each.gpus for each in self.types)

    def type_of(self, shape: ReplicaShape) -> ClusterSpec | None:
        """The type of GPU that a shape names; None where the cluster does not have it."""
        return next((each for each in self.types if each.name == shape.gpu), None)

    def dollars_per_hour(self, replicas: Iterable[tuple[ReplicaShape, int]]) -> float | None:
        """What so many replicas of each shape cost; None where a type of GPU that is used has no price."""
        total = 0.0
        for shape, count in replicas:
            kind = self.type_of(shape)
            if kind is None or kind.dollars_per_gpu_hour is None:
                return None
            total += kind.dollars_per_gpu_hour * shape.gpus * count
        return total

    def replica(self, tier: int, shape: ReplicaShape, longest_tokens: int) -> tuple[Replica | None, str]:
        """(a replica of tier `tier` with room for such a request in each lane, or None; why not)."""
        if self.remote_of(tier) is not None:
            return None, f"{self.tiers[tier]} is remote: it takes no GPUs"
        speculation = self.speculation_of(tier)
        drafters = [drafter for drafter, _ in speculation.drafters]
        if shape.gpus > 1 and (drafters or (self.has_drafts(tier) and not self.drafts_on_many)):
            return None, f"{self.tiers[tier]} has drafts: {ONE_GPU}, not {shape}"
        if self.measured and self.measured[tier]:
            measured = next((r for r in self.measured[tier] if r.shape == shape), None)
            if measured is None:
                return None, f"{self.tiers[tier]} has no profile for {shape}"
            if (room := measured.request_tokens) < longest_tokens:
                reason = f"{self.tiers[tier]} was measured with KV for {room} tokens, a request has {longest_tokens}"
                return None, reason
            return measured, ""
        model, kind = self.models[tier], self.type_of(shape)
        if kind is None:
            return None, f"the cluster has no GPUs of type '{shape.gpu}': {self.type_names}"
        fits = fit(model, shape, kind, self.runtime, longest_tokens * shape.pp, drafters)
        if not fits.ok:
            return None, fits.reason
        latency, drafting = self.step_times(tier, shape)
        latency = speculating_latency(
            latency,
            drafting,
            context_tokens=speculation.context_tokens,
            max_running=self.limits.max_running,
            max_window=speculation.max_window,
        )
        return Replica(shape, latency, fits.kv_tokens, self.limits), ""

    def only(self, tiers: Sequence[int]) -> "Site":
        """The same cluster for a cascade of some of the tiers, by number in ascending order.

        Nothing judges the answers of a single tier.

        Raises:
            InvalidRequest: The tier that grades is none of several tiers.
        """

        grading = self.grading if len(tiers) > 1 else None
        if grading is not None:
            if grading.by_tier and grading.tier not in tiers:
                there = ", ".join(_at(self.tiers, tiers))
                raise invalid("judge.tier", f"'{self.tiers[grading.tier]}' is none of the tiers: {there}")
            grading = replace(grading, tier=list(tiers).index(grading.tier) if grading.by_tier else len(tiers))
        speculation, remotes = _at(self.speculation, tiers), _at(self.remotes, tiers)
        return replace(
            self,
            tiers=_at(self.tiers, tiers),
            models=_at(self.models, tiers),
            measured=_at(self.measured, tiers),
            speculation=speculation if any(one.drafters for one in speculation) else (),
            grading=grading,
            remotes=remotes if any(remotes) else (),
            draft_acceptance=_at(self.draft_acceptance, tiers),
        )

    def remote_of(self, tier: int) -> RemoteTier | None:
        """The API that serves a tier; None where GPUs do."""
        return self.remotes[tier] if self.remotes else None

    def speculation_of(self, tier: int) -> TierSpeculation:
        """What drafts for a tier; without drafters where nothing does."""
        return self.speculation[tier] if self.speculation else TierSpeculation()

    def has_drafts(self, tier: int) -> bool:
        """Whether a tier's engine verifies drafts, of drafters or of answers that earlier tiers gave."""
        rejected = tier > 0 and bool(self.draft_acceptance) and self.draft_acceptance[tier] > 0
        return rejected or bool(self.speculation_of(tier).drafters)

    def without_drafters(self, tiers: Collection[int]) -> "Site":
        """The same site where nothing drafts for these tiers."""
        others = [TierSpeculation() if tier in tiers else each for tier, each in enumerate(self.speculation)]
        return replace(self, speculation=tuple(others) if any(each.drafters for each in others) else ())

    def step_times(self, tier: int, shape: ReplicaShape) -> tuple[StepLatencyModel, list[SimulatedDrafter]]:
        """By data sheets, the step times of a tier's model without drafts, and of what drafts for it.

        Raises:
            InvalidRequest: The cluster has no GPUs of the shape's type.
        """
        kind = self.type_of(shape)
        if kind is None:
            raise invalid("gpu", f"the cluster has no GPUs of type '{shape.gpu}': {self.type_names}")
        drafters = [
            SimulatedDrafter(roofline(drafter, ReplicaShape(1, 1), kind, DRAFT_RUNTIME), acceptance)
            for drafter, acceptance in self.speculation_of(tier).drafters
        ]
        return roofline(self.models[tier], shape, kind, self.runtime), drafters

    @property
    def type_names(self) -> str:
        """The types of GPU in words."""
        return ", ".join(each.name or each.gpu.name for each in self.types)


def _at(values: Sequence[_Value], tiers: Sequence[int]) -> tuple[_Value, ...]:
    """The values of some tiers; empty where no tier has one."""
    return tuple(values[tier] for tier in tiers) if values else ()


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What the cascade is to serve.

    judged: the whole judged sample, which decides about quality. requests: those that arrive, drawn from it, in order of
    arrival; arrival_s (N).
    """

    judged: JudgedSample
    requests: JudgedSample
    arrival_s: Floats

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self.arrival_s) else 0.0

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens that arrive, those that are cached."""
        return float(self.requests.cached.sum() / self.requests.input_tokens.sum())

    @property
    def rate_per_s(self) -> float | None:
        """Arrivals per second; None where they come all at once."""
        return (len(self.arrival_s) - 1) / self.seconds if self.seconds > 0 else None

    def under(self, rules: AcceptanceRules) -> "Demand":
        """The same requests under the routing of a plan."""
        return Demand(self.judged.under(rules), self.requests.under(rules), self.arrival_s)

    def only(self, tiers: Sequence[int]) -> "Demand":
        """The same requests for some of the tiers, by number in ascending order."""
        return Demand(self.judged.only(tiers), self.requests.only(tiers), self.arrival_s)

    def routed(self) -> "Demand":
        """The same requests, each sent to one tier by its predicted scores; see `JudgedSample.routed_by`."""
        judged = self.judged
        return Demand(routed_sample(judged), routed_sample(judged, self.requests), self.arrival_s)

    def scaled(self, factor: float) -> "Demand":
        """The same requests, `factor` times as fast."""
        return Demand(self.judged, self.requests, self.arrival_s / factor)


def with_drafts(judged: JudgedSample, site: Site) -> JudgedSample:
    """The same prompts, where tiers have rejected answers as drafts.

    A pass verifies as many tokens as give most requests per GPU second where all replicas are busy, as workers decide by what
    one more costs them.
    """
    if not any(site.draft_acceptance):
        return judged
    drafts = []
    for tier, acceptance in enumerate(site.draft_acceptance):
        inputs, outputs = judged.input_tokens, judged.output_tokens[:, tier]
        means = float(inputs.mean()), float(outputs.mean()), float(judged.cached.mean())
        kinds = replica_kinds(site, tier, site.gpus, int((inputs + outputs).max()))[0] if tier and acceptance else []
        served = {
            window: max(kind.capacity_per_s(*means, window, acceptance) / kind.shape.gpus for kind in kinds)
            for window in range(MOST_VERIFIED + 1 if kinds else 0)
        }
        drafts.append(GivenDrafts(acceptance, max(served, key=lambda window: served[window], default=0)))
    return replace(judged, drafts=tuple(drafts))


def replica_kinds(site: Site, tier: int, gpus: int, longest_tokens: int) -> tuple[list[Replica], str]:
    """(the replicas that a tier can have on so many GPUs, why the last shape that failed did not fit)."""
    kinds, reason = [], ""
    for cluster in site.types:
        widths = (1 << power for power in range(cluster.gpus_per_node.bit_length()))
        for tp, pp in itertools.product(widths, PIPELINES):
            plain = ReplicaShape(tp, pp, cluster.name)
            if plain.gpus > min(gpus, cluster.gpus):
                continue
            shapes = (plain, *_variants(site, tier, plain))
            for shape in (each for each in shapes if has_one_batch(each) or not site.one_batch):
                replica, why = site.replica(tier, shape, longest_tokens)
                if replica is not None:
                    kinds.append(replica)
                elif shape == plain:
                    reason = why
    return kinds, reason


def _variants(site: Site, tier: int, shape: ReplicaShape) -> Iterator[ReplicaShape]:
    """The same GPUs with data-parallel attention, expert parallelism or both, where these can matter.

    For a measured tier, those that were measured. Else data-parallel attention for a mixture of experts, whose attention is a
    small part of its weights, and for one KV head, of which tensor parallelism has a copy on each GPU; expert parallelism
    for a mixture of experts whose weights it takes. A dense model is searched in plain shapes only.
    """
    if site.measured and site.measured[tier]:
        same = (r.shape for r in site.measured[tier] if replace(r.shape, ep=1, attn_dp=1) == shape)
        yield from (each for each in same if each != shape)
        return
    model, tp = site.models[tier], shape.tp
    if tp == 1:
        return
    experts = replace(shape, ep=tp)
    divided = model.experts > 0 and not expert_parallelism_problem(model, experts)
    if divided:
        yield experts
    if model.experts or model.kv_heads == 1:
        yield replace(shape, attn_dp=tp)
        if divided:
            yield replace(shape, ep=tp, attn_dp=tp)
