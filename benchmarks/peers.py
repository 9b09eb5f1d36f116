"""CPU time of other routers under the load of `router_cost`: LiteLLM's proxy and SGLang's router, where they are installed.

Each forwards to a server without a model (`load_server`), whose replies get a token each 10 ms as those of the mesh do. They
are looked for on the PATH. To install them in an environment of their own:

    python -m venv peers && peers/bin/pip install 'litellm[proxy]' sglang-router
    PATH=$PATH:$PWD/peers/bin python -m benchmarks overhead
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.router_cost import STREAMED, WHOLE, load
from penstock.local.cpu_time import group_cpu_s
from penstock.services.processes import free_port

CONFIG = "config.yaml"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


LITELLM_CONFIG = """
model_list:
  - model_name: only
    litellm_params:
      model: openai/only
      api_base: {server}/v1
      api_key: none
"""
SGLANG_ARGUMENTS = (
    *("launch", "--host", "127.0.0.1", "--port", "{port}"),
    *("--prometheus-port", "{spare_port}", "--worker-urls", "{server}"),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another router.

    share: of the load of `router_cost` that it gets: the slow ones would take many minutes for all of it.
    health: a path that answers once requests are served. model: the name that requests are sent with.
    arguments: of its command line. config: content of the file `CONFIG` in the folder that it starts in.
    In both, {port} is to be listened on, {spare_port} is free, and {server} is the base URL of the server that it
    forwards to.
    """

    name: str
    executable: str
    package: str
    share: float
    health: str
    arguments: tuple[str, ...]
    config: str = ""
    model: str = "only"
    env: tuple[tuple[str, str], ...] = ()


# SGLang's router takes the model of a worker that does not name it for `unknown`.
PEERS = (
    Peer(
        "LiteLLM proxy",
        "litellm",
        "litellm[proxy]",
        share=0.1,
        health="/health/liveliness",
        arguments=("--config", CONFIG, "--host", "127.0.0.1", "--port", "{port}"),
        config=LITELLM_CONFIG,
        env=(
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),  # nothing is fetched
            ("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true"),  # it listens on loopback only
        ),
    ),
    Peer(
        "SGLang's router",
        "sglang-router",
        "sglang-router",
        share=1.0,
        health="/readiness",
        arguments=SGLANG_ARGUMENTS,
        model="unknown",
    ),
)


@contextmanager
def _process(command: list[str], folder: Path, name: str, health: str, env: dict[str, str]) -> Iterator[int]:
    """A server; its process id, once `health` (a URL) is answered.

    Raises:
        RuntimeError: it does not come up.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        _wait_until_served(health, process, log)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _running_peer(peer: Peer, executable: str) -> Iterator[tuple[str, int]]:
    """The peer in front of a load server: base URL of its OpenAI API, and process id."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder, port, server_port = Path(name), free_port(), free_port()
        server, base = f"http://127.0.0.1:{server_port}", f"http://127.0.0.1:{port}"
        values = {"port": port, "spare_port": free_port(), "server": server}
        (folder / CONFIG).write_text(peer.config.format(**values))
        command = [executable, *(argument.format(**values) for argument in peer.arguments)]
        serve = [sys.executable, "-m", "benchmarks.load_server", str(server_port)]
        with (
            _process(serve, folder, "server", server, {"PYTHONPATH": str(Path.cwd())}),
            _process(command, folder, "peer", base + peer.health, dict(peer.env)) as pid,
        ):
            yield f"{base}/v1", pid


def _wait_until_served(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise RuntimeError(f"no answer from {url}:\n{tail}")


def _measured(peer: Peer, url: str, pid: int) -> dict[str, float]:
    """CPU of the peer per whole reply and per 1,000 streamed tokens."""
    whole_replies = round(WHOLE["replies"] * peer.share)
    streamed_replies = max(STREAMED["connections"], round(STREAMED["replies"] * peer.share))
    load(url, replies=64, connections=32, tokens=8, stream=True, model=peer.model)  # warm
    before = group_cpu_s([pid])
    whole = load(
        url,
        replies=whole_replies,
        connections=WHOLE["connections"],
        tokens=WHOLE["tokens"],
        stream=False,
        model=peer.model,
    )
    between = group_cpu_s([pid])
    streamed = load(
        url,
        replies=streamed_replies,
        connections=STREAMED["connections"],
        tokens=STREAMED["tokens"],
        stream=True,
        model=peer.model,
    )
    after = group_cpu_s([pid])
    tokens = streamed_replies * STREAMED["tokens"]
    return {
        "cpu_ms_per_reply": 1000 * (between - before) / whole_replies,
        "cpu_ms_per_1000_tokens": 1e6 * (after - between) / tokens,
        "replies_per_s": whole_replies / whole["seconds"],
        "tokens_per_s": tokens / streamed["seconds"],
        "first_token_p50_ms": streamed["first_token_ms"]["p50"],
    }


def measure(rounds: int) -> dict[str, Any]:
    """The figures of each peer, round by round; `skipped` says why there are none."""
    figures: dict[str, Any] = {}
    for peer in PEERS:
        executable = shutil.which(peer.executable)
        if executable is None:
            reason = f"not installed: pip install '{peer.package}' (see benchmarks/peers.py)"
            print(f"{peer.name}: skipped, {reason}", flush=True)
            figures[peer.name] = {"skipped": reason}
            continue
        results = list[dict[str, float]]()
        for number in range(rounds):
            with _running_peer(peer, executable) as (url, pid):
                results.append(_measured(peer, url, pid))
            text = "  ".join(f"{key} {value:.2f}" for key, value in results[-1].items())
            print(f"round {number + 1}  {peer.name:<16}{text}", flush=True)
        figures[peer.name] = {"share_of_load": peer.share, "rounds": results}
    return figures
