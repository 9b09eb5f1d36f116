"""The site to plan for: cluster and cascade, checked as in files."""

from typing import Any, TypeVar

from google.protobuf.message import Message

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.files import (
    CascadeFile,
    ClusterFile,
    DrafterEntry,
    GpuEntry,
    ModelEntry,
    NodesEntry,
    RemoteEntry,
    SpeculationEntry,
    TierEntry,
)
from planner_service.planning_codec.parts import checked, fields_of, spec_of
from planner_service.planning_codec.replicas import replica_from_proto
from planner_service.simulator.remote import RemoteTier
from planner_service.site import Site, TierSpeculation
from services.domain.errors import invalid
from services.domain.hardware import ClusterSpec

_Entry = TypeVar("_Entry", ModelEntry, GpuEntry)


def site_from_proto(cluster: pb.Cluster, cascade: pb.Cascade) -> Site:
    where = _cluster_types(cluster)
    at = "inputs.cascade"
    entries, measured = [], []
    for i, tier in enumerate(cascade.tiers):
        here = f"{at}.tiers[{i}]"
        model = _name_or_spec(tier, "model", ModelEntry, here)
        speculation = _speculation(tier, here)
        entries.append(
            checked(
                TierEntry, {"name": tier.name, "model": model, "speculation": speculation, **_remote(tier, here)}, here
            )
        )
        measured.append(tuple(replica_from_proto(m, f"{here}.measured[{j}]") for j, m in enumerate(tier.measured)))
    message = fields_of(cascade) | {"tiers": entries}
    cascade_file = checked(CascadeFile, message, at)
    specs = tuple(spec_of(tier, f"{at}.tiers[{i}].model_name") for i, tier in enumerate(cascade_file.tiers))
    names = tuple(tier.name for tier in cascade_file.tiers)
    if len(where) > 1 and any(measured):
        first = next(i for i, replicas in enumerate(measured) if replicas)
        raise invalid(
            f"{at}.tiers[{first}].measured", "step times are measured on one type of GPU, the cluster has several"
        )
    return Site(
        where[0],
        names,
        specs,
        cascade_file.runtime.spec(),
        cascade_file.engine.spec(),
        cascade_file.judge_s,
        tuple(measured),
        where[1:],
        _speculations(cascade_file, at),
        cascade_file.grading(),
        _remotes(cascade_file, where, at),
    )


def _remote(tier: pb.CascadeTier, at: str) -> dict[str, RemoteEntry]:
    """The API that serves a tier, as a field of TierEntry; nothing where none does."""
    if not tier.HasField("remote"):
        return {}
    if tier.measured:
        raise invalid(f"{at}.remote", "not with measured replicas")
    return {"remote": checked(RemoteEntry, fields_of(tier.remote), f"{at}.remote")}


def _speculation(tier: pb.CascadeTier, at: str) -> SpeculationEntry:
    """What drafts for a tier, checked but for names of the catalogue."""
    if tier.measured and tier.speculation.drafters:
        raise invalid(f"{at}.speculation", "not with measured replicas, which are measured with what drafts")
    drafters = []
    for j, drafter in enumerate(tier.speculation.drafters):
        here = f"{at}.speculation.drafters[{j}]"
        model = _name_or_spec(drafter, "model", ModelEntry, here)
        fields = fields_of(drafter, "model_name", "model_spec") | {"model": model}
        drafters.append(checked(DrafterEntry, fields, here))
    fields = fields_of(tier.speculation, "drafters")
    return checked(SpeculationEntry, fields | {"drafters": drafters}, f"{at}.speculation")


def _remotes(cascade: CascadeFile, types: tuple[ClusterSpec, ...], at: str) -> tuple[RemoteTier | None, ...]:
    """The APIs that serve tiers. InvalidRequest where the cluster has no prices."""
    try:
        return cascade.remotes(types)
    except ValueError as error:
        first = next(i for i, tier in enumerate(cascade.tiers) if tier.remote is not None)
        raise invalid(f"{at}.tiers[{first}].remote", str(error).removeprefix("remote: ")) from None


def _speculations(cascade: CascadeFile, at: str) -> tuple[TierSpeculation, ...]:
    """What drafts, by tier. InvalidRequest for a model that the catalogue does not have."""
    for i, tier in enumerate(cascade.tiers):
        for j, drafter in enumerate(tier.speculation.drafters):
            spec_of(drafter, f"{at}.tiers[{i}].speculation.drafters[{j}].model_name")
    return cascade.speculations()


def _cluster_types(cluster: pb.Cluster) -> tuple[ClusterSpec, ...]:
    at = "inputs.cluster"
    if not cluster.types:
        return (spec_of(checked(NodesEntry, _nodes(cluster, at), at), f"{at}.gpu_name"),)
    if others := sorted(fields_of(cluster, "types")):
        raise invalid(f"{at}.{others[0]}", "give either types or the fields of one type")
    message = {"types": [_nodes(kind, f"{at}.types[{i}]") for i, kind in enumerate(cluster.types)]}
    cluster_file = checked(ClusterFile, message, at)
    for i, entry in enumerate(cluster_file.types):
        spec_of(entry, f"{at}.types[{i}].gpu_name")
    return cluster_file.specs()


def _nodes(nodes: pb.Cluster | pb.GpuType, at: str) -> dict[str, Any]:
    """What NodesEntry reads."""
    return fields_of(nodes, "gpu_name", "gpu_spec") | {"gpu": _name_or_spec(nodes, "gpu", GpuEntry, at)}


def _name_or_spec(message: Message, what: str, kind: type[_Entry], at: str) -> str | _Entry:
    """The field `{what}_spec` of a message, checked as a part of a file, or its `{what}_name`.

    Raises:
        InvalidRequest: It has neither, or the part is not sound; names the field.
    """
    name, spec = f"{what}_name", f"{what}_spec"
    if message.HasField(spec):
        return checked(kind, fields_of(getattr(message, spec)), f"{at}.{spec}")
    if message.HasField(name):
        named: str = getattr(message, name)
        return named
    raise invalid(f"{at}.{what}", f"give either {name} or {spec}")
