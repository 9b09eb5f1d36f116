"""LangChain, LiteLLM and OpenAI's npm client, each in an environment of its own: `make test-compat` installs them."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.compat.conftest import CompatMesh

pytestmark = [pytest.mark.compat, pytest.mark.timeout(300)]

VENV = Path(os.environ.get("COMPAT_VENV", Path.home() / ".cache" / "penstock-compat"))
CLIENTS = Path(__file__).with_name("clients")


async def output_of(*command: str) -> Any:
    """What a client prints. Proxies of the environment are not for calls of this machine to itself."""
    environment = os.environ | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()[-3000:]
    return json.loads(stdout.decode().strip().splitlines()[-1])


async def test_langchain(mesh: CompatMesh) -> None:
    """invoke, stream, with_structured_output by its three methods, an agent that may call two tools; by both endpoints."""
    got = await output_of(str(VENV / "bin" / "python"), str(CLIENTS / "langchain_client.py"), mesh.url)
    assert got["invoke"] == got["stream"] != ""
    assert got["usage"]["output_tokens"] > 0
    assert got["structured"]["function_calling"]["title"] in ("Dr", "Ms")
    assert got["structured"]["json_schema"]["title"] in ("Dr", "Ms")
    assert isinstance(got["structured"]["json_mode"], dict)
    for loop in (got["agent"], got["responses_agent"]):
        assert loop == {"called": ["lookup", "calculator"], "answer": "196"}
    assert got["responses"] == got["responses_stream"] != ""


async def test_litellm(mesh: CompatMesh) -> None:
    got = await output_of(str(VENV / "bin" / "python"), str(CLIENTS / "litellm_client.py"), mesh.url)
    assert len(got["turns"]) == 3
    assert all(got["turns"])
    assert got["streamed"] == got["turns"][0]
    assert len(got["arguments"]) >= 2
    assert all(isinstance(arguments["x"], int) for arguments in got["arguments"])
    assert got["final"]
    assert "max_tokens" in got["refused"]


async def test_openais_npm_client(mesh: CompatMesh) -> None:
    node = shutil.which("node")
    if node is None or not (VENV / "node_modules" / "openai").exists():
        pytest.skip("OpenAI's npm client is not installed: it needs node and npm")
    got = await output_of(node, str(CLIENTS / "openai_node.mjs"), mesh.url, str(VENV))
    assert got["whole"] == got["streamed"] == got["response"] != ""
    assert all(isinstance(arguments["x"], int) for arguments in got["arguments"])
    assert got["final"]
