"""Maps value types (dataclasses) to protobuf messages and back, field by field of the same name.

| message | value |
|---|---|
| `T x` | `x: T`; a default must be the zero of its type |
| `optional T x`, a nested message | `x: T | None`, or `x: T` with a default, which is not sent |
| `repeated T x` | `x: tuple[T, ...]`; `Annotated[..., AtMost(n, "tools")]` limits what is read |
| `map<K, V> x` of scalars | `x: Mapping[K, V]` |
| `Duration x`, `Timestamp x` | `x_s: float` |
| `E x` of an enum | `x: E`, a StrEnum with the names without prefix; unspecified, unknown: default, None or `E.UNKNOWN` |
| `M x`, where M has a single field | also `x: T`, the value of this field |
| `oneof x` | `x: A | B`: classes with a message's name, or with one field, of the same name; or `y: T | None` for each |
| a message that is one oneof | `A | B` in the same way |

Every field of a message has one of the value, and the other way round: types for which this does not hold are refused at
their first use. The functions of a type are generated as source, as dataclasses do it: they are as fast as code by hand.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from penstock.field_mapping import EnumMembers, EnumNumbers, MappingError, check_scalar, expect
from penstock.types.limits import AtMost

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)

_SECOND_NS = 1_000_000_000
_TIMES = ("google.protobuf.Duration", "google.protobuf.Timestamp")


def to_message(value: object, message_type: type[_M]) -> _M:
    """The message of a value.

    Raises:
        MappingError: The message cannot have the value of a field.
    """
    message = message_type()
    write(value, message)
    return message


def write(value: object, message: Message) -> None:
    """Write a value into an empty message. It may be part of another one: to assign it later would copy it.

    Raises:
        MappingError: as `to_message`.
    """
    key = type(value), type(message)
    if (writer := _writers.get(key)) is None:
        kind: Any = type(value)
        writer = _writers[key] = _codec(kind, message.DESCRIPTOR).write
    writer(value, message)


@overload
def from_message(message: Message, kind: type[_T]) -> _T: ...
@overload
def from_message(message: Message, kind: object) -> Any: ...
def from_message(message: Message, kind: Any) -> Any:
    """The value of a message. kind: its class, or a union of classes, if the message is a oneof.

    Raises:
        MappingError: A field is missing or too long.
    """
    key = id(kind), type(message)  # the hash of a union is slow
    if (entry := _readers.get(key)) is None:
        entry = _readers[key] = _codec(kind, message.DESCRIPTOR).read, kind
    return entry[0](message)


_writers: dict[tuple[type, type], Callable[[Any, Any], None]] = {}
_readers: dict[tuple[int, type], tuple[Callable[[Any], Any], Any]] = {}
"""With the type, so that no other one gets its id."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


@functools.cache
def _codec(kind: Any, descriptor: Descriptor) -> _Codec:
    """The functions of a type and a message.

    Raises:
        TypeError: They do not fit.
    """
    if descriptor.full_name in _TIMES:
        expect(kind is float, kind, descriptor)
        return _Codec(write_time, read_time)
    oneof = descriptor.oneofs[0] if len(descriptor.oneofs) == 1 else None
    if oneof is not None and len(oneof.fields) == len(descriptor.fields):
        classes, _ = _members(kind)
        if all(_alternative(each, oneof) is not None for each in classes):
            return _union(kind, oneof)
    if dataclasses.is_dataclass(kind):
        return _class(typing.cast(type, kind), descriptor)
    expect(len(descriptor.fields) == 1, kind, descriptor)
    source = _Source()
    source.add(kind, descriptor.fields[0], "value", None)
    return source.codec("{}")


def _class(kind: type, descriptor: Descriptor) -> _Codec:
    """The functions of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    targets: dict[str, FieldDescriptor | OneofDescriptor] = {}
    for each in descriptor.fields:
        is_time = each.message_type is not None and each.message_type.full_name in _TIMES
        oneof = each.containing_oneof
        if oneof is not None and oneof.name in hints:
            targets[oneof.name] = oneof
        else:
            targets[f"{each.name}_s" if is_time else each.name] = each
    source = _Source()
    for field in dataclasses.fields(kind):
        if field.name not in targets:
            raise TypeError(f"{descriptor.full_name} has no field for {kind.__name__}.{field.name}")
        source.add(hints[field.name], targets.pop(field.name), f"value.{field.name}", field)
    if targets:
        raise TypeError(f"{kind.__name__} has no field for {descriptor.full_name}.{next(iter(targets))}")
    return source.codec(f"{source.name(kind)}({{}})")


def _union(kind: Any, oneof: OneofDescriptor) -> _Codec:
    """The functions of a oneof: one pair for each class."""
    writes, reads = {}, {}
    classes, optional = _members(kind)
    for each in classes:
        field = _alternative(each, oneof)
        expect(field is not None, each, oneof.containing_type)
        assert field is not None
        source = _Source()
        if _is_message_of(each, field):
            source.add(each, field, "value", None)
            codec = source.codec("{}")
        else:
            hint = typing.get_type_hints(each, include_extras=True)[field.name]
            source.add(hint, field, f"value.{field.name}", None)
            codec = source.codec(f"{source.name(each)}({{}})")
        writes[each], reads[field.name] = codec.write, codec.read
    name, needed = oneof.name, f"one of {', '.join(reads)} is needed"

    def write_one(value: Any, message: Any) -> None:
        writes[type(value)](value, message)

    def read_one(message: Any) -> Any:
        if (read := reads.get(message.WhichOneof(name))) is not None:
            return read(message)
        if optional:
            return None
        raise MappingError("", needed)

    return _Codec(write_one, read_one)


class _Source:
    """The source of two functions. Each method below is one rule: its statements that write, and an expression that reads."""

    def __init__(self) -> None:
        helpers = (MappingError, _too_many, _read_all, _write_all)
        self._names: dict[str, Any] = {helper.__name__: helper for helper in helpers}
        self._writes: list[str] = []
        self._reads: list[str] = []
        self._results: list[str] = []

    def codec(self, result: str) -> _Codec:
        """result: expression of the value, with {} for what the fields give."""
        results = sorted(self._results, key=lambda result: "=" in result)  # inherited fields may be for keywords only
        lines = [
            "def write(value, message):",
            "    at = ''",
            "    try:",
            "        message.SetInParent()",  # an empty part of a message is there, too
            *(f"        {line}" for line in self._writes),
            "    except MappingError as error:",
            "        raise error.under(at) from None",
            "    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:",
            "        raise MappingError(at, f'cannot be sent: {error}') from error",
            "def read(message):",
            "    at = ''",
            "    try:",
            *(f"        {line}" for line in self._reads),
            f"        return {result.format(', '.join(results))}",
            "    except MappingError as error:",
            "        raise error.under(at) from None",
        ]
        exec("\n".join(lines), self._names)  # made of the names of fields
        return _Codec(self._names["write"], self._names["read"])

    def name(self, value: Any) -> str:
        """The name of a constant."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def add(
        self, hint: Any, field: FieldDescriptor | OneofDescriptor, value: str, of: "dataclasses.Field[Any] | None"
    ) -> None:
        """Add a field of the message. value: expression. of: the field of the dataclass; None: unset is an error."""
        limit = None
        if typing.get_origin(hint) is typing.Annotated:
            hint, *about = typing.get_args(hint)
            limit = next((each for each in about if isinstance(each, AtMost)), None)
        if limit is not None and not (isinstance(field, FieldDescriptor) and field.is_repeated):
            hint, limit = typing.Annotated[hint, limit], None  # of the only field of a message
        classes, optional = _members(hint)
        plain = classes[0] if len(classes) == 1 else functools.reduce(lambda a, b: a | b, classes)
        unset = "None" if optional else None
        if of is not None and of.default_factory is not dataclasses.MISSING:
            unset = f"{self.name(of.default_factory)}()"
        elif of is not None and of.default is not dataclasses.MISSING:
            unset = self.name(of.default)
        if isinstance(field, OneofDescriptor):
            codec, has = _union(plain, field), f"message.WhichOneof({field.name!r}) is not None"
            write, read = [f"{self.name(codec.write)}({value}, message)"], f"{self.name(codec.read)}(message)"
        elif field.is_repeated:
            expect(not optional, hint, field)
            write, read = self._repeated(plain, field, value)
            has = ""
        else:
            write, read = self._single(plain, field, value, unset)
            has = f"message.HasField({field.name!r})" if field.has_presence and field.enum_type is None else ""
            if not field.has_presence and field.enum_type is None:
                expect(not optional and (of is None or not of.default or unset is None), hint, field)
                write = [f"if {value}: {write[0]}"]
            elif field.has_presence and not optional and unset is not None:
                differs = "is not" if dataclasses.is_dataclass(plain) else "!="
                write = [f"if {value} {differs} {unset}: {write[0]}"]
            elif field.has_presence and field.message_type is None:
                expect(unset is not None or of is None, hint, field)
        if optional:
            write = [f"if {value} is not None:", *(f"    {line}" for line in write)]
        self._writes += [f"at = {field.name!r}", *write]
        number = len(self._results)
        whole = f"{read} if {has} else {unset}" if has and unset is not None else read
        self._reads.append(f"at = {field.name!r}")
        if isinstance(field, FieldDescriptor) and field.is_repeated:
            self._reads.append(f"values = message.{field.name}")
        if limit is not None:
            self._reads.append(f"if len(values) > {limit.count}: raise _too_many({self.name(limit)}, values)")
        self._reads.append(f"v{number} = {whole}")
        self._results.append(f"v{number}" if of is None or not of.kw_only else f"{of.name}=v{number}")

    def _single(self, hint: Any, field: FieldDescriptor, value: str, unset: str | None) -> tuple[list[str], str]:
        target = f"message.{field.name}"
        if field.message_type is not None:
            codec = _codec(hint, field.message_type)
            return [f"{self.name(codec.write)}({value}, {target})"], f"{self.name(codec.read)}({target})"
        if field.enum_type is not None:
            numbers = EnumNumbers(hint, field)
            members = EnumMembers(numbers)
            name = self.name(members)
            read = f"{name}[{target}]" if unset is None else f"{name}.get({target}, {unset})"
            return [f"{target} = {self.name(numbers)}[{value}]"], read
        check_scalar(hint, field)
        return [f"{target} = {value}"], target

    def _repeated(self, hint: Any, field: FieldDescriptor, value: str) -> tuple[list[str], str]:
        target = f"message.{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return self._map(hint, field.message_type, value, target)
        expect(typing.get_origin(hint) is tuple and len(typing.get_args(hint)) == 2, hint, field)
        item = typing.get_args(hint)[0]
        if field.message_type is not None:
            codec = _codec(item, field.message_type)
            write = f"if {value}: _write_all({self.name(codec.write)}, {value}, {target})"
            return [write], f"_read_all({self.name(codec.read)}, values) if values else ()"
        check_scalar(item, field)
        return [f"if {value}: {target}.extend({value})"], "tuple(values) if values else ()"

    def _map(self, hint: Any, entry: Descriptor, value: str, target: str) -> tuple[list[str], str]:
        expect(typing.get_origin(hint) is typing.get_origin(Mapping[str, str]), hint, entry)
        key, item = typing.get_args(hint)
        check_scalar(key, entry.fields_by_name["key"])
        check_scalar(item, entry.fields_by_name["value"])
        return [f"if {value}: {target}.update({value})"], "dict(values) if values else {}"


def _members(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """The types of a union or the one type, without None; and whether None is one."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return (hint,), False
    kinds = typing.get_args(hint)
    return tuple(kind for kind in kinds if kind is not type(None)), type(None) in kinds


def _alternative(kind: Any, oneof: OneofDescriptor) -> FieldDescriptor | None:
    """The field of a oneof that has the values of a class."""
    if not dataclasses.is_dataclass(kind):
        return None
    for field in oneof.fields:
        if _is_message_of(kind, field):
            return field
    names = [field.name for field in dataclasses.fields(kind)]
    return next((field for field in oneof.fields if names == [field.name]), None)


def _is_message_of(kind: Any, field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.name == kind.__name__)


def _too_many(limit: AtMost, values: Any) -> MappingError:
    return MappingError("", limit.problem(len(values)))


def _read_all(read: Callable[[Any], Any], messages: Any) -> tuple[Any, ...]:
    try:
        return tuple([read(message) for message in messages])
    except MappingError:
        for i, message in enumerate(messages):
            try:
                read(message)
            except MappingError as error:
                raise error.under(f"[{i}]") from None
        raise


def _write_all(write: Callable[[Any, Any], None], values: Iterable[Any], messages: Any) -> None:
    try:
        for value in values:
            write(value, messages.add())
    except MappingError as error:
        raise error.under(f"[{len(messages) - 1}]") from None


def write_time(value_s: float, message: Any) -> None:
    """Write seconds into an empty Duration or Timestamp."""
    nanoseconds = round(value_s * _SECOND_NS)
    if nanoseconds < 0:  # of a duration, both parts have the same sign
        message.FromNanoseconds(nanoseconds)
    else:
        message.seconds, message.nanos = divmod(nanoseconds, _SECOND_NS)
    message.SetInParent()


def duration(value_s: float) -> Duration:
    """Seconds as a Duration."""
    value = Duration()
    write_time(value_s, value)
    return value


def read_time(message: Any) -> float:
    """The seconds of a Duration or Timestamp."""
    nanoseconds: int = message.seconds * _SECOND_NS + message.nanos
    return nanoseconds / _SECOND_NS
