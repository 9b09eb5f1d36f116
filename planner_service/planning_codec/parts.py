"""Messages read as parts of files: the same models check them, and problems name the fields of the message."""

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError

from services.domain.errors import FieldProblem, InvalidRequest, invalid

_Part = TypeVar("_Part", bound=BaseModel)


def fields_of(message: Message, *without: str) -> dict[str, Any]:
    """The fields that a message sets."""
    fields = MessageToDict(message, preserving_proto_field_name=True)
    return {name: value for name, value in fields.items() if name not in without}


def checked(kind: type[_Part], fields: Mapping[str, Any], at: str) -> _Part:
    """`fields` as one part of a file; InvalidRequest with every fault under its path."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(*(FieldProblem(_path(at, e["loc"]), e["msg"]) for e in error.errors())) from None


def _path(at: str, place: tuple[int | str, ...]) -> str:
    return at + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


def spec_of(part: Any, at: str) -> Any:
    """What a part stands for; a name that the catalogue does not have is a fault of `at`."""
    try:
        return part.spec()
    except ValueError as error:
        raise invalid(at, str(error)) from None


def problems_under(at: str, error: InvalidRequest) -> InvalidRequest:
    """The same problems, their fields named from `at` on."""
    return InvalidRequest(
        *(FieldProblem(f"{at}.{p.field.removeprefix('latency.')}", p.problem) for p in error.problems)
    )
