#!/usr/bin/env bash
# install.sh [FOLDER]: LangChain and LiteLLM in a virtual environment of their own, and OpenAI's npm client where there is npm.
set -euo pipefail
venv=${1:-${COMPAT_VENV:-$HOME/.cache/penstock-compat}}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -c 'import langchain_openai, litellm, mcp' 2>/dev/null || \
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'langchain-openai>=1' 'litellm>=1.80' mcp  # mcp: LiteLLM imports it for tools
if command -v npm >/dev/null && [ ! -d "$venv/node_modules/openai" ]; then
    npm install --silent --no-audit --no-fund --prefix "$venv" 'openai@>=6'
fi
