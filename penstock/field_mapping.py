"""How single fields of values and messages fit together: scalars, enums, and what is wrong with them."""

import enum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_SCALARS: dict[int, type] = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


class MappingError(ValueError):
    """A value or a message cannot be mapped. field: path of the message's field; empty for the whole message."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field, self.problem = field, problem

    def under(self, name: str) -> "MappingError":
        """The same error, of a message that is field `name` of another one."""
        separator = "" if not self.field or not name or self.field.startswith("[") else "."
        return MappingError(f"{name}{separator}{self.field}", self.problem)


class EnumNumbers(dict[Any, int]):
    """Numbers of an enum's members, by member and so by its string."""

    def __init__(self, kind: Any, field: FieldDescriptor) -> None:
        expect(isinstance(kind, type) and issubclass(kind, enum.StrEnum), kind, field)
        assert field.enum_type is not None
        values = {value.number: value.name for value in field.enum_type.values}
        prefix = values.pop(0).removesuffix("UNSPECIFIED")
        names = {name.removeprefix(prefix) for name in values.values()}
        expect(names == kind.__members__.keys() - {"UNKNOWN"}, kind, field)
        self.unknown = kind.__members__.get("UNKNOWN")
        super().__init__({} if self.unknown is None else {self.unknown: 0})
        self.update({kind[name.removeprefix(prefix)]: number for number, name in values.items()})

    def __missing__(self, key: object) -> int:
        raise MappingError("", f"must be one of {', '.join(self)}, not '{key}'")


class EnumMembers(dict[int, Any]):
    """Members of an enum, by number."""

    def __init__(self, numbers: EnumNumbers) -> None:
        super().__init__({number: member for member, number in numbers.items()})
        self._unknown = numbers.unknown

    def __missing__(self, key: object) -> Any:
        if self._unknown is not None:
            return self._unknown
        raise MappingError("", f"must be one of {', '.join(self.values())}")


def check_scalar(hint: Any, field: FieldDescriptor) -> None:
    text = bytes if field.type == FieldDescriptor.TYPE_BYTES else str
    expect(hint is _SCALARS.get(field.cpp_type, text), hint, field)


def expect(fits: bool, hint: Any, field: Any) -> None:
    if not fits:
        raise TypeError(f"{hint} does not fit {field.full_name}")
