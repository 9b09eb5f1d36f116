"""`python scripts/schema_lines.py`: the modules that read or build messages of values by their fields, and their lines.

Counted are modules of the product that build a message which is neither request nor response of a call, or declare a variable
of its type, and the mapper and the plan file. A message that is only given to the mapper does not count. Left out: stubs,
the hot path: tokens and load records, which have codecs of their own.
"""

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "penstock/cli",
    "penstock/client",
    "penstock/local",
    *sorted(p.name for p in ROOT.glob("*_service")),
    "services",
)
ALWAYS = ("penstock/mapper.py", "planner_service/codecs/plan_file.py")
HOT = (
    "services/proto_codec.py",
    "services/state/codec.py",
    "worker_service/replies/reply_demultiplexer.py",
    "worker_service/replies/token_columns.py",
    "router_service/clients/reply_multiplexer.py",
)
STUBS = ("common", "judge", "planner", "router", "worker")
_ENVELOPE = re.compile(r"(Request|Response)\Z")


def value_messages() -> set[str]:
    """The messages that are no envelope of a call."""
    result: set[str] = set()
    for name in STUBS:
        stubs = importlib.import_module(f"penstock.proto.{name}.v1.{name}_pb2")
        result |= {each for each in stubs.DESCRIPTOR.message_types_by_name if not _ENVELOPE.search(each)}
    return result


def handles_one(source: str, messages: set[str]) -> bool:
    """Whether a module names one of the messages, as an attribute of a stub, but for the mapper."""
    tree = ast.parse(source)
    mapped = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "to_message"
        for argument in call.args
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in messages
        and isinstance(node.value, ast.Name)
        and (node.value.id == "pb" or node.value.id.endswith("_pb2"))
        and id(node) not in mapped
        for node in ast.walk(tree)
    )


def main() -> None:
    messages = value_messages()
    counted = {ROOT / path for path in ALWAYS if (ROOT / path).exists()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if str(path.relative_to(ROOT)) not in HOT and handles_one(path.read_text(), messages):
                counted.add(path)
    lines = {path: len(path.read_text().splitlines()) for path in sorted(counted)}
    for path, count in lines.items():
        print(f"{count:6,}  {path.relative_to(ROOT)}")
    print(f"{sum(lines.values()):6,}  in {len(lines)} modules")


if __name__ == "__main__":
    main()
