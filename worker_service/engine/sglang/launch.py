"""The command line and environment of an SGLang server for a tier. No I/O.

The flags are those of SGLang 0.5.23. Features that the engine does itself are disabled (warm-up, text, preemption by
priority), and features that it needs are enabled (metrics, priorities, incremental output).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from penstock.services.domain.server_nodes import ServerNode


@dataclass(frozen=True, slots=True)
class ServerShape:
    """The configuration of one server.

    python: an interpreter with sglang. tp, pp, dp, ep, attn_dp: parallelism. gpus: GPU ids; empty: the environment decides.
    mem_fraction: of a GPU's memory; None: the KV cache holds `kv_tokens`; None: the server decides.
    max_running, max_queued: of each of the dp copies. max_step_tokens: None: the server decides. With attn_dp, these and
    kv_tokens are of all its groups together.
    kv_store: a folder shared with other servers of the model; empty: none. kv_store_bytes: how much of it this one may fill.
    mixed_chunk: a step computes decodes and a chunk of prompts together, instead of the chunk alone.
    trace_to: host:port of an OTLP collector; empty: none.
    adapter: the folder of a LoRA adapter that requests may use; empty: none.
    node: the part of a server over several nodes; None: all of it.
    """

    python: str
    model: str
    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    attn_dp: int = 1
    gpus: tuple[int, ...] = ()
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    mem_fraction: float | None = None
    kv_tokens: int | None = 32_768
    kv_block_tokens: int = 16
    max_running: int = 32
    max_queued: int = 64
    max_step_tokens: int | None = 512
    max_context_tokens: int | None = None
    deterministic: bool = False
    kv_store: str = ""
    kv_store_bytes: int = 32 << 30
    structured_output: bool = False
    mixed_chunk: bool = False
    trace_to: str = ""
    adapter: str = ""
    node: ServerNode | None = None
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def command(shape: ServerShape, port: int, host: str = "127.0.0.1") -> list[str]:
    """The command line of a server that listens at `host` and `port`."""
    device, _, number = shape.device.partition(":")
    options: dict[str, object] = {
        "model-path": shape.model,
        "served-model-name": shape.name,
        "host": host,
        "port": port,
        "device": device,
        "dtype": shape.dtype,
        "tp-size": shape.tp,
        "pp-size": shape.pp,
        "dp-size": shape.dp,
        "page-size": shape.kv_block_tokens,
        "log-level-http": "warning",  # otherwise it logs a line per poll
        "max-running-requests": shape.max_running,
        # requests that arrive within one step are queued before any is run
        "max-queued-requests": shape.max_running + shape.max_queued,
    }
    options |= {f"{name}-size": size for name, size in (("ep", shape.ep), ("attn-dp", shape.attn_dp)) if size > 1}
    if shape.max_step_tokens is not None:  # full pages
        pages = max(1, shape.max_step_tokens // shape.kv_block_tokens)
        options["chunked-prefill-size"] = pages * shape.kv_block_tokens
    if number:
        options["base-gpu-id"] = number
    if (node := shape.node) is not None:
        options |= {"nnodes": node.count, "node-rank": node.rank, "dist-init-addr": node.address}
    if shape.mem_fraction is not None:
        options["mem-fraction-static"] = shape.mem_fraction
    elif shape.kv_tokens is not None:
        options["max-total-tokens"] = shape.kv_tokens // shape.attn_dp  # of each group, unlike the limits above
    if shape.max_context_tokens is not None:
        options["context-length"] = shape.max_context_tokens
    switches = [
        "skip-server-warmup",
        "enable-metrics",
        "enable-cache-report",
        "enable-priority-scheduling",
        "disable-priority-preemption",
        "incremental-streaming-output",
        "sleep-on-idle",
    ]
    # Forms of replies are compiled for a tokenizer. Without bounds on white space, weak models write nothing else.
    switches.append("constrained-json-disable-any-whitespace" if shape.structured_output else "skip-tokenizer-init")
    if device == "cpu":
        switches.append("disable-overlap-schedule")  # on a CPU, a token would only wait for the next step
    if shape.mixed_chunk:
        switches.append("enable-mixed-chunk")
    if shape.deterministic:
        switches.append("enable-deterministic-inference")
    if shape.trace_to:
        switches.append("enable-trace")
        options["otlp-traces-endpoint"] = shape.trace_to
    if shape.adapter:
        switches.append("enable-lora")
        # one slot is for requests without an adapter, such as the server's own
        options |= {"lora-paths": f"{Path(shape.adapter).name}={shape.adapter}", "max-loras-per-batch": 2}
        if device == "cpu":
            options["lora-backend"] = "torch_native"
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
    """The environment variables of the server, in addition to those of this process."""
    # without OMP_NUM_THREADS, torch uses all cores in each process; logprobs are before temperature and top-p
    variables = {"OMP_NUM_THREADS": str(shape.threads), "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    if shape.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, shape.gpus))
    if shape.kv_store:
        variables["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = shape.kv_store
        variables["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] = str(shape.kv_store_bytes)
    return variables | dict(shape.env)


def gpus_of(gpus: Seq[int], index: int, each: int) -> tuple[int, ...]:
    """The GPUs of the worker with this index in its tier.

    Raises:
        ValueError: There are not enough GPUs.
    """
    assigned = tuple(gpus[index * each : (index + 1) * each])
    if gpus and len(assigned) < each:
        raise ValueError(f"no {each} GPUs for worker {index} among {len(gpus)}")
    return assigned
