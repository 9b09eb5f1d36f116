"""How to start an SGLang server: its command line and environment from what a tier asks for. No I/O.

Flags as of SGLang 0.5.23. What the server would do a second time is switched off (its warm-up, text, its own idea of which
running request gives way), what we rely on is switched on (metrics, priorities, tokens sent once).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What one server is to be.

    python: the interpreter that has sglang. tp, pp, dp: its parallelism. gpus: their ids; empty leaves them to the
        environment.
    mem_fraction: of a GPU's memory; None gives the KV cache room for `kv_tokens`.
    kv_store: a folder shared with other servers of the model; empty for none.
    trace_to: host:port of an OTLP collector; empty for none.
    """

    python: str
    model: str
    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    gpus: tuple[int, ...] = ()
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    mem_fraction: float | None = None
    kv_tokens: int = 32_768
    kv_block_tokens: int = 16
    max_running: int = 32
    max_queued: int = 64
    max_step_tokens: int = 512
    max_context_tokens: int | None = None
    deterministic: bool = False
    kv_store: str = ""
    trace_to: str = ""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def command(shape: ServerShape, port: int) -> list[str]:
    """The command line of a server that listens on loopback at `port`."""
    device, _, number = shape.device.partition(":")
    chunk = max(1, shape.max_step_tokens // shape.kv_block_tokens) * shape.kv_block_tokens  # whole pages
    options: dict[str, object] = {
        "model-path": shape.model,
        "served-model-name": shape.name,
        "host": "127.0.0.1",
        "port": port,
        "device": device,
        "dtype": shape.dtype,
        "tp-size": shape.tp,
        "pp-size": shape.pp,
        "dp-size": shape.dp,
        "page-size": shape.kv_block_tokens,
        "chunked-prefill-size": chunk,
        "log-level-http": "warning",  # one line for each poll of ours otherwise
        "max-running-requests": shape.max_running * shape.dp,
        # all that come within one step stand in its queue before any is run
        "max-queued-requests": (shape.max_running + shape.max_queued) * shape.dp,
    }
    if number:
        options["base-gpu-id"] = number
    if shape.mem_fraction is not None:
        options["mem-fraction-static"] = shape.mem_fraction
    else:
        options["max-total-tokens"] = shape.kv_tokens
    if shape.max_context_tokens is not None:
        options["context-length"] = shape.max_context_tokens
    switches = [
        "skip-server-warmup",
        "skip-tokenizer-init",
        "enable-metrics",
        "enable-cache-report",
        "enable-priority-scheduling",
        "disable-priority-preemption",
        "incremental-streaming-output",
        "sleep-on-idle",
    ]
    if device == "cpu":
        switches.append("disable-overlap-schedule")  # it computes at once: a token would only wait for the next step's
    if shape.deterministic:
        switches.append("enable-deterministic-inference")
    if shape.trace_to:
        switches.append("enable-trace")
        options["otlp-traces-endpoint"] = shape.trace_to
    if shape.kv_store:
        switches.append("enable-hierarchical-cache")
        options |= {
            "hicache-io-backend": "direct",
            "hicache-mem-layout": "layer_first",
            "hicache-write-policy": "write_through",
            "hicache-storage-backend": "file",
            "hicache-storage-prefetch-policy": "wait_complete",
        }
    argv = [shape.python, "-m", "sglang.launch_server"]
    argv += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*argv, *(f"--{name}" for name in switches), *shape.flags]


def environment(shape: ServerShape) -> dict[str, str]:
    """What its process's environment holds beyond ours."""
    # without OMP_NUM_THREADS torch takes every core for each process; logprobs are those before temperature and top-p
    made = {"OMP_NUM_THREADS": str(shape.threads), "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    if shape.gpus:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, shape.gpus))
    if shape.kv_store:
        made["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = shape.kv_store
    return made | dict(shape.env)


def gpus_of(gpus: Seq[int], index: int, each: int) -> tuple[int, ...]:
    """The GPUs of a tier's worker number `index`. ValueError if there are none left for it."""
    mine = tuple(gpus[index * each : (index + 1) * each])
    if gpus and len(mine) < each:
        raise ValueError(f"no {each} GPUs for worker {index} among {len(gpus)}")
    return mine
