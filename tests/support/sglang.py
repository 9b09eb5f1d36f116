"""Starts a real SGLang server for tests and benchmarks; see sglang_cpu/README.md."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).with_name("sglang_cpu")
VENV = Path(os.environ.get("SGLANG_VENV", Path.home() / ".cache" / "penstock-sglang"))
START_TIMEOUT_S = 180.0

# Flags of servers that share what they have computed, through files in SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.
SHARED_STORE = (
    *("--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    "--enable-cache-report",
)


def installed() -> bool:
    """Whether install.sh has been run here."""
    return (VENV / "bin" / "python").exists() and any(VENV.glob("lib/python*/site-packages/sglang"))


@contextmanager
def sglang_server(model: Path, port: int, log: Path, *flags: str) -> Iterator[str]:
    """A running server; yields its base URL."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(FOLDER / "launch.sh"), str(model), str(port), *flags],
            stdout=out,
            stderr=out,
            env={**os.environ, "SGLANG_VENV": str(VENV)},
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_TIMEOUT_S
        url = f"http://127.0.0.1:{port}"
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SGLang did not start:\n{log.read_text()[-6000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the server and its own processes
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
