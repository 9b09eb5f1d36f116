"""Values from the JSON form of their messages, and from shorter forms.

Enums without prefix (`goal: cost`), a GPU or a model by its name, a cluster of one type by the type's fields, a tier's
`profiles` by path instead of `measured`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from penstock.field_mapping import MappingError
from penstock.mapper import from_message
from penstock.question_files.errors import FileError
from penstock.question_files.profile_files import load_replica

_NAMED = ("Gpu", "Model")  # messages that may be given by name
_Value = TypeVar("_Value")


def value_from(
    content: Mapping[str, Any],
    message_type: type[Message],
    kind: type[_Value],
    where: str,
    folder: Path = Path(),
    *,
    ignore_unknown: bool = False,
) -> _Value:
    """where: names the content in errors. folder: of the paths in it. ignore_unknown: pass over what is no field.

    Raises:
        FileError: A field is unknown or has another type; named from `where` on.
    """
    try:
        whole = _Form(folder, ignore_unknown=ignore_unknown).whole(content, message_type.DESCRIPTOR, "")
        return from_message(ParseDict(whole, message_type()), kind)
    except (ParseError, MappingError, _Unsound) as error:
        raise FileError(f"{where}: {error}") from None


class _Unsound(Exception):
    """A field is none of the message, or is of another kind."""


class _Form:
    def __init__(self, folder: Path, *, ignore_unknown: bool) -> None:
        self._folder, self._ignore_unknown = folder, ignore_unknown

    def whole(self, content: Any, descriptor: Any, at: str) -> dict[str, Any]:
        """The JSON form of a message, from its shorter forms."""
        if isinstance(content, str) and descriptor.name in _NAMED:
            return {"name": content}
        if not isinstance(content, Mapping):
            raise _Unsound(f"{at}: must be fields with their values, not {content!r}")
        if descriptor.name == "Cluster" and "types" not in content:
            content = {"types": [content]}
        whole = dict[str, Any]()
        for name, value in content.items():
            here = f"{at}.{name}" if at else str(name)
            field = descriptor.fields_by_name.get(str(name))
            if name == "profiles" and descriptor.name == "CascadeTier":
                whole["measured"] = [_replica(self._folder / each) for each in _list(value, here)]
            elif field is not None:
                if value is not None:
                    whole[name] = self._field(field, value, here)
            elif not self._ignore_unknown:
                there = ", ".join(field.name for field in descriptor.fields)
                raise _Unsound(f"{here}: there is no such field; there are {there}")
        return whole

    def _field(self, field: FieldDescriptor, value: Any, at: str) -> Any:
        kind = field.message_type
        if kind is None:
            return value if field.enum_type is None else _member(field, value, at)
        if kind.GetOptions().map_entry:
            return value
        if field.is_repeated:
            return [self.whole(part, kind, f"{at}[{i}]") for i, part in enumerate(_list(value, at))]
        return self.whole(value, kind, at)


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Unsound(f"{at}: must be a list, not {value!r}")
    return value


def _member(field: FieldDescriptor, value: Any, at: str) -> str:
    """`GOAL_COST` of `cost`."""
    assert field.enum_type is not None
    names = [each.name for each in field.enum_type.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    name = f"{prefix}{str(value).replace('-', '_').upper().removeprefix(prefix)}"
    if name not in names[1:]:
        known = (each.removeprefix(prefix).replace("_", "-").lower() for each in names[1:])
        raise _Unsound(f"{at}: must be {' or '.join(known)}, not {str(value)[:80]}")
    return name


def _replica(path: Path) -> dict[str, Any]:
    """The JSON form of a measured replica."""
    fields = dataclasses.asdict(load_replica(path))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
