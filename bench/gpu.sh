#!/usr/bin/env bash
# Measures a GPU in at most 8 minutes and writes gpu-results/gpu.json and gpu.md; see bench/gpu.py, or bench/gpu.sh --help.
# Takes $PYTHON, or ./.venv, or python3. What is missing is installed into ./.venv, which sees what that Python has (torch).
set -euo pipefail
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}" TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
has() { "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))" "$@"; }

needs="jax flax transformers safetensors llguidance psutil tqdm"
extras="bench,dev"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  cuda=12
  if nvidia-smi | grep -q "CUDA Version: 1[3-9]"; then cuda=13; fi
  extras="cuda$cuda,$extras"
  # a plug-in for another CUDA than the driver's best works too: drivers run older ones
  if has jax && ! has jax_cuda12_plugin && ! has jax_cuda13_plugin; then needs="$needs jax_cuda${cuda}_plugin"; fi
fi
# shellcheck disable=SC2086
if ! has $needs; then
  echo "bench/gpu.sh: $python lacks some of: $needs. Installing .[$extras] into .venv" >&2
  if ! { "$python" -m venv --system-site-packages .venv && .venv/bin/python -m pip install --quiet -e ".[$extras]"; }; then
    echo "bench/gpu.sh: that failed (no network?). Going on with what $python has; what can't run says so." >&2
    echo "bench/gpu.sh: to bring it: pip download '.[$extras]' elsewhere, then pip install --no-index --find-links." >&2
  else
    python=.venv/bin/python
  fi
  if ! has jax flax psutil tqdm safetensors; then
    echo "bench/gpu.sh: without jax, flax, psutil, tqdm and safetensors nothing can be measured" >&2
    exit 1
  fi
fi
exec "$python" -m bench.gpu "$@"
