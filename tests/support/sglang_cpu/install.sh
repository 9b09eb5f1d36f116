#!/usr/bin/env bash
# install.sh [FOLDER]: SGLang for CPUs in a virtual environment of its own.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-${SGLANG_VENV:-$HOME/.cache/penstock-sglang}}
[ -x "$venv/bin/python" ] && PYTHONPATH=$here/stub "$venv/bin/python" -c 'import sglang' 2>/dev/null && exit 0
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
grep -v -E '^(sglang|torch|torchvision|xgrammar|apache-tvm-ffi)=' "$here/requirements.lock.txt" > "$venv/requirements.txt"
"$venv/bin/pip" install --quiet -r "$venv/requirements.txt"
# their declared needs are CUDA packages
"$venv/bin/pip" install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11
