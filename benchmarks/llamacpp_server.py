"""llama.cpp's own server as a process, from the package whose library the engine uses: `MODEL KV_TOKENS PARALLEL PORT`.

Prints a line when it serves, and ends with its input.
"""

import sys
from pathlib import Path

import xllamacpp


def main(model: str, kv_tokens: int, parallel: int, port: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias, params.port, params.verbosity = model, {Path(model).stem}, port, 0
    params.n_ctx, params.n_parallel, params.kv_unified = kv_tokens, parallel, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
