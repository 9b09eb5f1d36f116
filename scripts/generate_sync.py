"""`python scripts/generate_sync.py`: write the blocking clients from the asyncio ones. `--check`: fail if they differ.

The asyncio clients are written by hand; the blocking ones are the same text with other tokens, examples included. What
differs in more than that, how a stream is read, is in `penstock/client/silence.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "penstock" / "client"
MODULES = {"aio.py": "sync.py", "aio_planner.py": "sync_planner.py"}
DOCSTRING = r'''"""The blocking client \1, for programs without an event loop. Thread-safe.

Generated from the asyncio client by `scripts/generate_sync.py`.
"""'''
TOKENS = (
    (r'\A"""The asyncio client ([^"]*)\."""', DOCSTRING),
    (r"from grpc import aio\n", "import grpc\n"),
    (r"from typing import ", "from typing import Any, "),
    (r"from contextlib import aclosing", "from contextlib import closing"),
    (r"\baio\.AioRpcError\b", "grpc.RpcError"),
    (r"\baio\.ClientInterceptor\b", "Any"),
    (r"\bconnection\.aio_channel\b", "connection.channel"),
    (r"\bread_in_loop\b", "read_in_thread"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\bAsyncGenerator\[([^\[\]]+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bAsync(Client|PlannerClient)\b", r"\1"),
    (r"AsyncStub\b", "Stub"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"\baclosing\b", "closing"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
)


def generated(source: str, target: str) -> str:
    text = (CLIENT / source).read_text()
    for token, replacement in TOKENS:
        text = re.sub(token, replacement, text)
    name = ("--stdin-filename", str(CLIENT / target), "-")
    for command in (("check", "--fix", "--quiet", "--select", "I,F401"), ("format", "--quiet")):
        ruff = (sys.executable, "-m", "ruff", *command, *name)
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> None:
    for source, target in MODULES.items():
        text = generated(source, target)
        if "--check" not in sys.argv:
            (CLIENT / target).write_text(text)
        elif (CLIENT / target).read_text() != text:
            sys.exit(f"penstock/client/{target} differs from {source}: run `python scripts/generate_sync.py`")


if __name__ == "__main__":
    main()
