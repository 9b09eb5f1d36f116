"""Every field of every message survives the way through its value type, and what does not fit is refused by name."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import penstock.types
from penstock.field_mapping import MappingError
from penstock.mapper import from_message, to_message
from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2
from penstock.proto.planner.v1 import planner_pb2
from penstock.proto.router.v1 import router_pb2
from penstock.proto.worker.v1 import worker_pb2
from penstock.types.planning import PlanningQuestion
from penstock.types.plans import Plan, TierPlan
from penstock.types.requests import AnswerRequest, GenerationRequest
from penstock.types.rules import LongAnswers

FILES = (common_pb2, judge_pb2, planner_pb2, router_pb2, worker_pb2)
VARIANTS = 17  # more than any oneof has fields and any enum has values


def _value_types() -> dict[str, Any]:
    """Dataclasses and unions of `penstock.types`, by name."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(penstock.types.__path__, "penstock.types."):
        module = importlib.import_module(info.name)
        found |= {
            name: kind for name, kind in vars(module).items() if dataclasses.is_dataclass(kind) or _is_union(kind)
        }
    return found


def _is_union(kind: Any) -> bool:
    return type(kind).__name__ == "UnionType"


VALUE_TYPES = _value_types()


def _messages() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.DESCRIPTOR.message_types_by_name.values()


HOT = {"penstock.common.v1.TokenFrame"}
"""With codecs by hand: what is sent for every token."""
OTHERS = {"penstock.router.v1.Model", "penstock.router.v1.Trace"}
"""With the names of the value types of other messages."""
VALUE_TYPES |= {
    "penstock.router.v1.GenerateRequest": AnswerRequest,
    "penstock.worker.v1.GenerateRequest": GenerationRequest,
}


def _value_type(descriptor: Descriptor) -> Any:
    """The value type of a message; None without one."""
    return VALUE_TYPES.get(descriptor.full_name, VALUE_TYPES.get(descriptor.name))


MAPPED = [each for each in _messages() if _value_type(each) is not None and each.full_name not in HOT | OTHERS]


def _filled(descriptor: Descriptor, variant: int) -> Message:
    """A message with all fields set, to values that differ by field. variant: selects of oneofs and enums."""
    message = GetMessageClass(descriptor)()
    for i, field in enumerate(descriptor.fields):
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.fields[variant % len(oneof.fields)] is not field:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = _filled(field.message_type, variant)
            target = getattr(message, field.name)
            if isinstance(entry.value, Message):  # type: ignore[attr-defined]
                target[entry.key].CopyFrom(entry.value)  # type: ignore[attr-defined]
            else:
                target[entry.key] = entry.value  # type: ignore[attr-defined]
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(field, variant + k, i) for k in range(3))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(field, variant, i))
        else:
            setattr(message, field.name, _value(field, variant, i))
    return message


def _value(field: FieldDescriptor, variant: int, place: int) -> Any:
    if field.message_type is not None:
        return _filled(field.message_type, variant)
    if field.enum_type is not None:
        return field.enum_type.values[1 + variant % (len(field.enum_type.values) - 1)].number
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = f"{field.name} {variant}"
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:  # not the default, which is not sent
            return not field.has_presence or len(field.containing_oneof.fields) > 1  # type: ignore[union-attr]
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return variant + place + 0.25
        case _:
            return variant + place + 1001  # no default


@pytest.mark.parametrize("descriptor", MAPPED, ids=lambda each: each.full_name)
def test_every_field_survives(descriptor: Descriptor) -> None:
    """A message becomes the same message by way of its value."""
    for variant in range(VARIANTS):
        message = _filled(descriptor, variant)
        value = from_message(message, _value_type(descriptor))
        assert to_message(value, type(message)) == message
        assert from_message(to_message(value, type(message)), _value_type(descriptor)) == value


def test_an_unset_field_has_the_default() -> None:
    assert from_message(planner_pb2.PlanningQuestion(seed=3), PlanningQuestion) == PlanningQuestion(
        seed=3, percentile=95
    )


def test_too_many_entries_are_refused_by_name() -> None:
    tiers = [planner_pb2.TierPlan(), planner_pb2.TierPlan(drafters=["small"] * 65)]
    with pytest.raises(MappingError) as refused:
        from_message(planner_pb2.Plan(tiers=tiers), Plan)
    assert (refused.value.field, refused.value.problem) == ("tiers[1].drafters", "at most 64 models, not 65")


def test_a_value_that_does_not_fit_is_refused_by_name() -> None:
    rule = LongAnswers(100, "high")  # type: ignore[arg-type]
    with pytest.raises(MappingError, match=r"^tiers\[0\]\.long_answers\.threshold: "):
        to_message(Plan(tiers=(TierPlan("small", "s", 70.0, 1, long_answers=rule),)), planner_pb2.Plan)


def test_a_field_without_its_like_is_refused() -> None:
    """A type that has forgotten a field of its message, has one too many, or another type, fails at its first use."""

    @dataclass(frozen=True)
    class Short:
        from_tokens: int

    @dataclass(frozen=True)
    class Long(LongAnswers):
        more: int = 0

    @dataclass(frozen=True)
    class Other:
        from_tokens: int
        threshold: int

    for kind in (Short, Long, Other):
        with pytest.raises(TypeError, match=r"threshold|more"):
            from_message(planner_pb2.LongAnswers(), kind)
