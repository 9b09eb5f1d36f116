"""The command line and environment of an SGLang server for a tier. No I/O.

The flags are those of SGLang 0.5.23. Features that the engine does itself are disabled (warm-up, text, preemption by
priority), and features that it needs are enabled (metrics, priorities, incremental output).
"""

from collections.abc import Mapping
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
    on_cpu, page, step_tokens = device == "cpu", shape.kv_block_tokens, shape.max_step_tokens
    of_each_group = None if shape.kv_tokens is None else shape.kv_tokens // shape.attn_dp
    options: dict[str, object] = {  # without those that are None
        "model-path": shape.model,
        "served-model-name": shape.name,
        "host": host,
        "port": port,
        "device": device,
        "dtype": shape.dtype,
        "tp-size": shape.tp,
        "pp-size": shape.pp,
        "dp-size": shape.dp,
        "ep-size": shape.ep if shape.ep > 1 else None,
        "attn-dp-size": shape.attn_dp if shape.attn_dp > 1 else None,
        "page-size": page,
        "log-level-http": "warning",  # otherwise it logs a line per poll
        "max-running-requests": shape.max_running,
        # requests that arrive within one step are queued before any is run
        "max-queued-requests": shape.max_running + shape.max_queued,
        "chunked-prefill-size": step_tokens and max(page, step_tokens // page * page),  # full pages
        "base-gpu-id": number or None,
        "mem-fraction-static": shape.mem_fraction,
        "max-total-tokens": of_each_group if shape.mem_fraction is None else None,  # unlike the limits above
        "context-length": shape.max_context_tokens,
        "otlp-traces-endpoint": shape.trace_to or None,
    }
    if (node := shape.node) is not None:
        options |= {"nnodes": node.count, "node-rank": node.rank, "dist-init-addr": node.address}
    if shape.adapter:
        # one slot is for requests without an adapter, such as the server's own
        options |= {"lora-paths": f"{Path(shape.adapter).name}={shape.adapter}", "max-loras-per-batch": 2}
        options["lora-backend"] = "torch_native" if on_cpu else None
    if shape.kv_store:
        options |= {
            "hicache-io-backend": "direct",
            "hicache-mem-layout": "layer_first",
            "hicache-write-policy": "write_through",
            "hicache-storage-backend": "file",
            "hicache-storage-prefetch-policy": "wait_complete",
        }
    switches = {
        "skip-server-warmup": True,
        "enable-metrics": True,
        "enable-cache-report": True,
        "enable-priority-scheduling": True,
        "disable-priority-preemption": True,
        "incremental-streaming-output": True,
        "sleep-on-idle": True,
        # Forms of replies are compiled for a tokenizer. Without bounds on white space, weak models write nothing else.
        "constrained-json-disable-any-whitespace": shape.structured_output,
        "skip-tokenizer-init": not shape.structured_output,
        "disable-overlap-schedule": on_cpu,  # on a CPU, a token would only wait for the next step
        "enable-mixed-chunk": shape.mixed_chunk,
        "enable-deterministic-inference": shape.deterministic,
        "enable-trace": bool(shape.trace_to),
        "enable-lora": bool(shape.adapter),
        "enable-hierarchical-cache": bool(shape.kv_store),
    }
    argv = [shape.python, "-m", "sglang.launch_server"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)] if value is not None else []
    return [*argv, *(f"--{name}" for name, on in switches.items() if on), *shape.flags]


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
