"""Converts records to and from JSON, which is readable with redis-cli.

Unknown fields are ignored, so versions can mix. What a process of another version cannot read has another format: readers
take their own and the one before it, so that the services of a mesh can be replaced one by one.
"""

import dataclasses
from typing import Annotated

from google.protobuf.json_format import MessageToJson, Parse, ParseError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

import penstock
from penstock.mapper import from_message, to_message
from penstock.proto.planner.v1 import planner_pb2
from penstock.services.domain.instances import DesiredWorkers, InstanceRecord, Load, ModelCard, Role, SloHeadroom
from penstock.services.field_problems import from_json
from penstock.types.mesh_status import Drafting, Loading, StagePlace
from penstock.types.plans import Plan

MAX_TEXT_CHARS = 4096
FORMAT = 2
"""Of what instances write of themselves. Of version 1 are registrations without a format."""
MAX_COUNT = 2**53
"""Of anything that an instance counts: greater integers are no longer exact as floating point numbers."""


Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _printable(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS or not text.isprintable():
        raise ValueError(f"must be printable and at most {MAX_TEXT_CHARS} characters")
    return text


Text = Annotated[str, AfterValidator(_printable)]


def _bounded(card: ModelCard) -> ModelCard:
    for name, value in dataclasses.asdict(card).items():
        if isinstance(value, str):
            _printable(value)
        elif not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{name}: must be from 0 to {MAX_COUNT}")
    return card


class _Written(BaseModel):
    """What does not change while a process lives begins with who has written it."""

    model_config = ConfigDict(strict=True)

    format: Count = 1
    version: Text = "unknown"


class _Registration(_Written):
    """The rest, as in InstanceRecord."""

    instance_id: Text
    role: Role
    address: Text
    epoch: Number
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    metrics_address: Text
    http_address: Text = ""
    admin_address: Text = ""
    group_id: Text = ""
    tier: Text = ""
    model: Annotated[ModelCard, AfterValidator(_bounded)] | None = None


_OF_RECORDS = _Registration.model_fields.keys() - _Written.model_fields.keys()


def registration_to_json(record: InstanceRecord) -> bytes:
    """What does not change while the process lives."""
    own = {name: getattr(record, name) for name in _OF_RECORDS}
    written = _Registration.model_construct(format=FORMAT, version=penstock.__version__, **own)
    return written.model_dump_json(exclude_defaults=True).encode()


def registration_from_json(data: bytes) -> InstanceRecord:
    """A record without load and place, with sequence 0.

    Raises:
        ValueError: It is not a registration, or of a version that is too far away; names the field.
    """
    written = from_json(_Written, data)
    if written.format not in (FORMAT, FORMAT - 1):
        raise ValueError(
            f"format: it writes format {written.format} (Penstock {written.version[:40]}), but this process reads "
            f"{FORMAT - 1} and {FORMAT} (Penstock {penstock.__version__})"
        )
    registration = from_json(_Registration, data)
    return InstanceRecord(sequence=0, **{name: getattr(registration, name) for name in _OF_RECORDS})


class Head(BaseModel):
    """The part of an instance's entry that its whole tier reads: the state of the instance without its load.

    at: (epoch, sequence). gone: the instance has deregistered. place: (stage, from_tokens, to_tokens).
    """

    model_config = ConfigDict(strict=True)

    at: tuple[Number, Count]
    gone: bool = False
    draining: bool = False
    place: tuple[Count, Count, Count] | None = None

    @property
    def epoch(self) -> float:
        return self.at[0]

    def record(self, registration: InstanceRecord, load: Load | None) -> InstanceRecord:
        """The record of the instance. load: None if it has none, or was not read."""
        place = None if self.place is None else StagePlace(*self.place)
        return dataclasses.replace(registration, sequence=self.at[1], draining=self.draining, place=place, load=load)


def head_to_json(record: InstanceRecord, *, gone: bool = False) -> bytes:
    """An instance's head."""
    place = None if record.place is None else dataclasses.astuple(record.place)
    at = (record.epoch, record.sequence)
    head = Head.model_construct(at=at, gone=gone, draining=record.draining, place=place)
    return head.model_dump_json(exclude_defaults=True).encode()


class _Load(BaseModel):
    """Short names, because routers read the loads of a whole tier several times a second."""

    model_config = ConfigDict(strict=True, populate_by_name=True)

    running_tokens: tuple[Count, ...] = Field((), alias="run")
    queued_tokens: tuple[Count, ...] = Field((), alias="wait")
    input_tokens: tuple[Count, ...] = Field((), alias="in")
    free_kv_blocks: Count = Field(0, alias="free")
    cached_tokens: Count = Field(0, alias="cached")
    output_tokens_per_s: Number = Field(0.0, alias="out_rate")
    prompt_tokens_per_s: Number = Field(0.0, alias="in_rate")
    kv_bytes_per_s: Number = Field(0.0, alias="kv_rate")
    awaited: tuple[Text, ...] = ()
    pending_tokens: Count | None = Field(None, alias="pending")
    slo: tuple[Number, Number, Count] | None = None
    drafting: tuple[tuple[Text, ...], Count, Number | None] | None = None
    loading: tuple[Number, Number | None] | None = None
    leads: bool = False
    desired: tuple[Count, tuple[tuple[Text, Count], ...]] | None = None


_DIGITS = {"output_tokens_per_s": 5, "prompt_tokens_per_s": 5, "kv_bytes_per_s": 2}
"""Of rates: what follows is noise, and would be written again and again."""
_OF_LOADS = _Load.model_fields.keys() - {"slo", "drafting", "loading", "desired"}


def load_to_json(load: Load) -> bytes:
    """The load of an instance."""
    values = {name: getattr(load, name) for name in _OF_LOADS}
    values |= {name: float(f"{values[name]:.{digits}g}") for name, digits in _DIGITS.items()}
    if (slo := load.slo) is not None:
        values["slo"] = (round(slo.backlog_s, 4), round(slo.prompt_tokens_per_s, 1), slo.free_kv_tokens)
    if (drafting := load.drafting) is not None:
        share = drafting.accepted_share
        values["drafting"] = (drafting.chain, drafting.window, None if share is None else round(share, 3))
    if load.loading is not None:
        values["loading"] = dataclasses.astuple(load.loading)
    if load.desired is not None:
        values["desired"] = (load.desired.revision, load.desired.counts)
    return _Load.model_construct(**values).model_dump_json(by_alias=True, exclude_defaults=True).encode()


def load_from_json(data: bytes) -> Load:
    """Raises:
    ValueError: It is not a load; names the field.
    """
    load = from_json(_Load, data)
    return Load(
        slo=None if load.slo is None else SloHeadroom(*load.slo),
        drafting=None if load.drafting is None else Drafting(*load.drafting),
        loading=None if load.loading is None else Loading(*load.loading),
        desired=None if load.desired is None else DesiredWorkers(*load.desired),
        **{name: getattr(load, name) for name in _OF_LOADS},
    )


def plan_to_json(plan: Plan) -> bytes:
    """A plan's message as JSON, which people can read."""
    return MessageToJson(to_message(plan, planner_pb2.Plan), preserving_proto_field_name=True, indent=None).encode()


def plan_from_json(data: bytes) -> Plan:
    """Raises:
    ValueError: It is not a plan.
    """
    try:
        plan = from_message(Parse(data, planner_pb2.Plan(), ignore_unknown_fields=True), Plan)
    except (ParseError, RecursionError) as error:
        raise ValueError(f"not a plan: {error}") from error
    if not plan.tiers:
        raise ValueError("not a plan: it has no tiers")
    return plan
