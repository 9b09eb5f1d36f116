#!/usr/bin/env bash
# launch.sh MODEL_DIR PORT [more SGLang flags]: a real SGLang server on this machine's CPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${SGLANG_VENV:-$HOME/.cache/penstock-sglang}
model=$1 port=$2
shift 2
export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$here/stub
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --device cpu --attention-backend torch_native \
  --max-total-tokens "${SGLANG_MAX_TOKENS:-16384}" --host 127.0.0.1 --port "$port" --skip-server-warmup "$@"
