"""Converts records to and from JSON, which is readable with redis-cli. Unknown fields are ignored, so versions can mix."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

from services.domain.bursts import BurstLadder, BurstStep, BurstThreshold
from services.domain.early_checks import EarlyCheck
from services.domain.instances import Drafting, InstanceRecord, Load, ModelCard, Role, SloHeadroom
from services.domain.long_answers import LongAnswers
from services.domain.plans import JudgeUnavailable, Plan, Prediction, Provenance, TierPlan
from services.domain.stages import QoeModel, Stage
from services.domain.stages.places import StagePlace

MAX_TEXT_CHARS = 4096
MAX_COUNT = 2**53
"""Of anything that an instance counts: greater integers are no longer exact as floating point numbers."""


@dataclass(frozen=True, slots=True)
class Head:
    """The part of an instance's entry that its whole tier reads: the state of the instance without its load.

    epoch, sequence, draining, place: as in `InstanceRecord`. gone: the instance has deregistered.
    """

    epoch: float
    sequence: int
    draining: bool = False
    place: StagePlace | None = None
    gone: bool = False

    @property
    def version(self) -> tuple[float, int]:
        return self.epoch, self.sequence

    def record(self, registration: InstanceRecord, load: Load | None) -> InstanceRecord:
        """The record of the instance. load: None if it has none, or was not read."""
        return dataclasses.replace(
            registration, sequence=self.sequence, draining=self.draining, place=self.place, load=load
        )


def registration_to_json(record: InstanceRecord) -> bytes:
    """What does not change while the process lives."""
    data: dict[str, Any] = {
        "instance_id": record.instance_id,
        "role": record.role.value,
        "address": record.address,
        "epoch": record.epoch,
        "lease_s": record.lease_s,
        "metrics_address": record.metrics_address,
        "http_address": record.http_address,
        "admin_address": record.admin_address,
    }
    if record.group_id:
        data["group_id"] = record.group_id
    if record.model is not None:
        data["model"] = dataclasses.asdict(record.model)
    return json.dumps(data, separators=(",", ":")).encode()


def registration_from_json(data: bytes) -> InstanceRecord:
    """A record without load and place, with sequence 0.

    Raises:
        ValueError: It is not a registration; the message names the field.
    """
    try:
        raw = _mapping(data)
        texts = ("instance_id", "address", "metrics_address", "http_address", "group_id", "admin_address")
        epoch, lease_s = _number(raw["epoch"], "epoch"), _number(raw["lease_s"], "lease_s")
        missing = {"instance_id", "address", "metrics_address"} - raw.keys()
        if missing:
            raise ValueError(f"{min(missing)}: is missing")
        if lease_s <= 0:
            raise ValueError(f"lease_s: must be greater than 0, not {lease_s}")
        return InstanceRecord(
            role=Role(raw["role"]),
            epoch=epoch,
            sequence=0,
            lease_s=lease_s,
            model=_card(raw["model"]) if raw.get("model") is not None else None,
            **{name: _typed(raw[name], name, str) for name in texts if name in raw},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a registration: {error!r}") from error


def head_to_json(record: InstanceRecord, *, gone: bool = False) -> bytes:
    """An instance's head: `at` is [epoch, sequence], `place` is [stage, from_tokens, to_tokens]."""
    data: dict[str, Any] = {"at": [record.epoch, record.sequence]}
    if gone:
        data["gone"] = True
    if record.draining:
        data["draining"] = True
    if record.place is not None:
        data["place"] = dataclasses.astuple(record.place)
    return json.dumps(data, separators=(",", ":")).encode()


def head_from_json(data: bytes) -> Head:
    """Raises:
    ValueError: It is not a head; the message names the field.
    """
    try:
        raw = _mapping(data)
        epoch, sequence = raw["at"]
        _number(epoch, "at")
        _count(sequence, "at")
        place = raw.get("place")
        if place is not None:
            stage, from_tokens, to_tokens = (_count(value, "place") for value in place)
            place = StagePlace(stage, from_tokens, to_tokens)
        gone, draining = (_typed(raw.get(name, False), name, bool) for name in ("gone", "draining"))
        return Head(epoch, sequence, draining, place, gone)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the head of an entry: {error!r}") from error


def load_to_json(load: Load) -> bytes:
    """The load of an instance. Short names, because routers read those of a whole tier several times a second."""
    data: dict[str, Any] = {}
    for name, short in _LENGTHS.items():
        if lengths := getattr(load, name):
            data[short] = lengths
    for name, (short, digits) in _NUMBERS.items():
        if value := getattr(load, name):
            data[short] = value if digits is None else float(f"{value:.{digits}g}")  # what follows is noise
    if load.pending_tokens is not None:
        data["pending"] = load.pending_tokens
    if (slo := load.slo) is not None:
        data["slo"] = [round(slo.backlog_s, 4), round(slo.prompt_tokens_per_s, 1), slo.free_kv_tokens]
    if (drafting := load.drafting) is not None:
        share = drafting.accepted_share
        data["drafting"] = [drafting.chain, drafting.window, None if share is None else round(share, 3)]
    return json.dumps(data, separators=(",", ":")).encode()


_LENGTHS = {"running_tokens": "run", "queued_tokens": "wait", "input_tokens": "in"}
_NUMBERS = {  # by name: the short name, and the digits of a rate; None for a count
    "free_kv_blocks": ("free", None),
    "output_tokens_per_s": ("out_rate", 5),
    "cached_tokens": ("cached", None),
    "prompt_tokens_per_s": ("in_rate", 5),
    "kv_bytes_per_s": ("kv_rate", 2),
    "arrivals_per_s": ("arrivals", 3),
}


def load_from_json(data: bytes) -> Load:
    """Raises:
    ValueError: It is not a load; the message names the field.
    """
    try:
        raw = _mapping(data)
        values: dict[str, Any] = {name: _lengths(raw.get(short, ()), short) for name, short in _LENGTHS.items()}
        for name, (short, digits) in _NUMBERS.items():
            values[name] = _count(raw.get(short, 0), short) if digits is None else _number(raw.get(short, 0.0), short)
        slo, drafting, pending = raw.get("slo"), raw.get("drafting"), raw.get("pending")
        return Load(
            pending_tokens=None if pending is None else _count(pending, "pending"),
            slo=None if slo is None else _headroom(slo),
            drafting=None if drafting is None else _drafting(drafting),
            **values,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a load: {error!r}") from error


def _headroom(raw: list[Any]) -> SloHeadroom:
    backlog_s, prompt_tokens_per_s, free_kv_tokens = raw
    return SloHeadroom(_number(backlog_s, "slo"), _number(prompt_tokens_per_s, "slo"), _count(free_kv_tokens, "slo"))


def _drafting(raw: list[Any]) -> Drafting:
    chain, window, share = raw
    if not isinstance(chain, list):
        raise ValueError("drafting: must be a list of model names, the window and the share")
    for model in chain:
        _typed(model, "drafting", str)
    accepted = None if share is None else _number(share, "drafting")
    return Drafting(tuple(chain), _count(window, "drafting"), accepted)


def _card(raw: dict[str, Any]) -> ModelCard:
    fields = [field for field in dataclasses.fields(ModelCard) if field.name in raw]
    return ModelCard(**{f.name: _typed(raw[f.name], f.name, f.type) for f in fields})


def _typed(value: Any, name: str, kind: Any) -> Any:
    """The value, if it is of the type; numbers as `_number` and `_count` say."""
    if kind is float:
        return _number(value, name)
    if kind is int:
        return _count(value, name)
    if type(value) is not kind:
        raise ValueError(f"{name}: must be of type {kind.__name__}, not {value!r}"[:200])
    if kind is str and (len(value) > MAX_TEXT_CHARS or not value.isprintable()):
        raise ValueError(f"{name}: must be printable and at most {MAX_TEXT_CHARS} characters, not {value!r}"[:200])
    return value


def _number(value: Any, name: str) -> float:
    """A finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: must be a finite number of at least 0, not {value!r}"[:200])
    return float(value)


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name}: must be an integer from 0 to {MAX_COUNT}, not {value!r}"[:200])
    return value


def _lengths(values: Any, name: str) -> tuple[int, ...]:
    lengths = tuple(values)
    if lengths and (set(map(type, lengths)) != {int} or min(lengths) < 0 or max(lengths) > MAX_COUNT):
        raise ValueError(f"{name}: must be a list of integers from 0 to {MAX_COUNT}")
    return lengths


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
                    tuple(t.get("drafters", ())),
                    LongAnswers(long["from_tokens"], long["threshold"]) if (long := t.get("long_answers")) else None,
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
            burst=_ladder(raw["burst"]) if raw.get("burst") else None,
            best_answer=_typed(raw.get("best_answer", False), "best_answer", bool),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a plan: {error!r}") from error


def _ladder(raw: dict[str, Any]) -> BurstLadder:
    return BurstLadder(
        raw["mean_quality"],
        tuple(
            BurstStep(
                tuple(BurstThreshold(t["score"], t["tie_share"]) for t in step["thresholds"]),
                step["quality"],
                step["rate_per_s"],
                step["tier"],
                step["tier_share"],
            )
            for step in raw["steps"]
        ),
    )


def _mapping(data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(raw, dict):
        raise TypeError("not a mapping")
    return raw
