#!/usr/bin/env bash
# Makes .venv with one version of torch, foak from this tree and what `nox -s gpu` and `nox -s bench` need.
# Usage: tools/gpu_environment.sh TORCH NUMBER_OF_GPUS
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv --clear .venv
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "torch==$1" nox hatchling editables pytest pytest-timeout pytest-xdist hypothesis liger-kernel
"${pip[@]}" install "torch==$1" --no-build-isolation -e shared/kernels -e "packages/core[train]" -e packages/fast-kernels \
  -e "packages/quantized-peft[bitsandbytes]" -e packages/padding-free
.venv/bin/python -c "import torch; assert torch.cuda.device_count() == $2, f'{torch.cuda.device_count()} GPUs, not $2'"
