"""The page of the protocol: services, messages and enums of protos/ with their comments. Part of the site."""

import inspect
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def protocol_page() -> str:
    """The services with their calls, and all messages with their fields, by package."""
    parts = ["# Protocol\n"]
    for file in _descriptors():
        comments = {tuple(place.path): _text(place.leading_comments) for place in file.source_code_info.location}
        parts.append(f"## `{file.package}`\n")
        for i, service in enumerate(file.service):
            parts.append(f"### `{service.name}`\n\n{comments.get((6, i), '')}\n\n| call | | |\n|---|---|---|")
            for j, call in enumerate(service.method):
                request, response = (
                    f"{'stream ' if streams else ''}{_short(kind)}"
                    for streams, kind in (
                        (call.client_streaming, call.input_type),
                        (call.server_streaming, call.output_type),
                    )
                )
                parts.append(f"| `{call.name}` | `{request} -> {response}` | {_cell(comments.get((6, i, 2, j), ''))} |")
            parts.append("")
        for i, message in enumerate(file.message_type):
            parts += _message(message, message.name, (4, i), comments)
        for i, values in enumerate(file.enum_type):
            parts += _enum(values, values.name, (5, i), comments)
    return "\n".join(parts)


def _message(message: Any, name: str, path: tuple[int, ...], comments: dict[tuple[int, ...], str]) -> list[str]:
    if message.options.map_entry:
        return []
    parts = [f"#### `{name}`\n\n{comments.get(path, '')}\n"]
    if message.field:
        parts.append("| field | | |\n|---|---|---|")
    for i, field in enumerate(message.field):
        repeated = "repeated " if field.label == field.LABEL_REPEATED else ""
        kind = _short(field.type_name) or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)[5:].lower()
        parts.append(f"| `{field.name}` | `{repeated}{kind}` | {_cell(comments.get((*path, 2, i), ''))} |")
    parts.append("")
    for i, nested in enumerate(message.nested_type):
        parts += _message(nested, f"{name}.{nested.name}", (*path, 3, i), comments)
    for i, values in enumerate(message.enum_type):
        parts += _enum(values, f"{name}.{values.name}", (*path, 4, i), comments)
    return parts


def _enum(values: Any, name: str, path: tuple[int, ...], comments: dict[tuple[int, ...], str]) -> list[str]:
    rows = [f"| `{value.name}` | {_cell(comments.get((*path, 2, i), ''))} |" for i, value in enumerate(values.value)]
    return [f"#### `{name}`\n\n{comments.get(path, '')}\n\n| value | |\n|---|---|", *rows, ""]


def _descriptors() -> list[descriptor_pb2.FileDescriptorProto]:
    """The files of protos/, with their comments."""
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        includes = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(
            ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out}", *map(str, protos)]
        ):
            sys.exit("protoc failed on protos/")
        return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _text(comment: str) -> str:
    return inspect.cleandoc(comment).replace("<", "&lt;")


def _cell(comment: str) -> str:
    return " ".join(_text(comment).split()).replace("|", "\\|")
