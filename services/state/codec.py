"""Converts records to and from JSON, which is readable with redis-cli. Unknown fields are ignored, so versions can mix."""

import dataclasses
import json
from typing import Any

from services.domain.early_checks import EarlyCheck
from services.domain.instances import Drafting, InstanceRecord, Load, ModelCard, Role, SloHeadroom
from services.domain.plans import JudgeUnavailable, Plan, Prediction, Provenance, TierPlan
from services.domain.stages import QoeModel, Stage
from services.domain.stages.places import StagePlace


def record_to_json(record: InstanceRecord) -> bytes:
    data: dict[str, Any] = {
        "instance_id": record.instance_id,
        "role": record.role.value,
        "address": record.address,
        "epoch": record.epoch,
        "sequence": record.sequence,
        "lease_s": record.lease_s,
        "draining": record.draining,
        "metrics_address": record.metrics_address,
        "http_address": record.http_address,
        "admin_address": record.admin_address,
    }
    if record.group_id:
        data["group_id"] = record.group_id
    if record.model is not None:
        data["model"] = dataclasses.asdict(record.model)
    if record.load is not None:
        data["load"] = {
            "running_tokens": record.load.running_tokens,
            "queued_tokens": record.load.queued_tokens,
            "free_kv_blocks": record.load.free_kv_blocks,
            "output_tokens_per_s": round(record.load.output_tokens_per_s, 1),
            "input_tokens": record.load.input_tokens,
            "cached_tokens": record.load.cached_tokens,
            "pending_tokens": record.load.pending_tokens,
            "prompt_tokens_per_s": round(record.load.prompt_tokens_per_s, 1),
        }
        if record.load.kv_bytes_per_s:
            data["load"]["kv_bytes_per_s"] = float(f"{record.load.kv_bytes_per_s:.2g}")  # what follows is noise
        if record.load.slo is not None:
            slo = record.load.slo
            data["load"]["slo"] = {
                "backlog_s": round(slo.backlog_s, 4),
                "prompt_tokens_per_s": round(slo.prompt_tokens_per_s, 1),
                "free_kv_tokens": slo.free_kv_tokens,
            }
        if record.load.drafting is not None:
            drafting = record.load.drafting
            share = drafting.accepted_share
            data["load"]["drafting"] = {
                "chain": drafting.chain,
                "window": drafting.window,
                "accepted_share": None if share is None else round(share, 3),
            }
    if record.place is not None:
        data["place"] = dataclasses.asdict(record.place)
    return json.dumps(data, separators=(",", ":")).encode()


def record_from_json(data: bytes) -> InstanceRecord:
    """Raises:
    ValueError: It is not a record.
    """
    try:
        raw = _mapping(data)
        model, load, place = raw.get("model"), raw.get("load"), raw.get("place")
        return InstanceRecord(
            instance_id=raw["instance_id"],
            role=Role(raw["role"]),
            address=raw["address"],
            epoch=raw["epoch"],
            sequence=raw["sequence"],
            lease_s=raw["lease_s"],
            draining=raw["draining"],
            metrics_address=raw["metrics_address"],
            http_address=raw.get("http_address", ""),
            model=ModelCard(**{f.name: model[f.name] for f in dataclasses.fields(ModelCard) if f.name in model})
            if model
            else None,
            load=Load(
                tuple(load["running_tokens"]),
                tuple(load["queued_tokens"]),
                load["free_kv_blocks"],
                load["output_tokens_per_s"],
                tuple(load.get("input_tokens", ())),
                cached_tokens=load.get("cached_tokens", 0),
                slo=_headroom(load.get("slo")),
                pending_tokens=load.get("pending_tokens"),
                prompt_tokens_per_s=load.get("prompt_tokens_per_s", 0.0),
                kv_bytes_per_s=load.get("kv_bytes_per_s", 0.0),
                drafting=_drafting(load.get("drafting")),
            )
            if load
            else None,
            place=StagePlace(place["stage"], place["from_tokens"], place["to_tokens"]) if place else None,
            group_id=raw.get("group_id", ""),
            admin_address=raw.get("admin_address", ""),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an instance record: {error!r}") from error


def _headroom(slo: dict[str, Any] | None) -> SloHeadroom | None:
    return SloHeadroom(slo["backlog_s"], slo["prompt_tokens_per_s"], slo["free_kv_tokens"]) if slo else None


def _drafting(drafting: dict[str, Any] | None) -> Drafting | None:
    if not drafting:
        return None
    return Drafting(tuple(drafting["chain"]), drafting["window"], drafting["accepted_share"])


def plan_to_json(plan: Plan) -> bytes:
    data = dataclasses.asdict(plan) | {"judge_unavailable": plan.judge_unavailable.value}
    return json.dumps(data, separators=(",", ":")).encode()


def plan_from_json(data: bytes) -> Plan:
    """Raises:
    ValueError: It is not a plan.
    """
    try:
        raw = _mapping(data)
        provenance = raw["provenance"]
        prediction = provenance.get("prediction")
        return Plan(
            revision=raw["revision"],
            tiers=tuple(
                TierPlan(
                    t["name"],
                    t["model"],
                    t["threshold"],
                    t["instances"],
                    tuple(Stage(**{f.name: s[f.name] for f in dataclasses.fields(Stage)}) for s in t.get("stages", ())),
                    QoeModel(**{f.name: t["qoe"][f.name] for f in dataclasses.fields(QoeModel)})
                    if t.get("qoe")
                    else None,
                    t.get("skip_below"),
                    tuple(EarlyCheck(c["after_tokens"], c["reject_below"]) for c in t.get("early_checks", ())),
                )
                for t in raw["tiers"]
            ),
            scorer=raw["scorer"],
            judge_unavailable=JudgeUnavailable(raw["judge_unavailable"]),
            provenance=Provenance(
                provenance["source"],
                provenance["note"],
                provenance["created_at"],
                provenance["input_digest"],
                Prediction(**{f.name: prediction[f.name] for f in dataclasses.fields(Prediction)})
                if prediction
                else None,
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a plan: {error!r}") from error


def _mapping(data: bytes) -> dict[str, Any]:
    raw = json.loads(data)
    if not isinstance(raw, dict):
        raise TypeError("not a mapping")
    return raw
