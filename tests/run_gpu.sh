#!/usr/bin/env bash
# The tests that need an NVIDIA GPU, with the python3 at hand: it must have torch, triton,
# transformers, peft, safetensors, typer and pytest. Nothing is installed; a skip is a failure.
# Usage: tests/run_gpu.sh [pytest arguments]; WORKERS=8 runs that many processes (pytest-xdist).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
links=$PWD/build/gpu
rm -rf "$links" && mkdir -p "$links/moelora"
for part in cli slicing kernels validate; do ln -s "$PWD/$part" "$links/moelora/$part"; done
export PYTHONPATH=$links PYTHONSAFEPATH=1 MOELORA_REQUIRE_GPU=1 HF_HUB_OFFLINE=1
python3 - <<'PY'
import peft, torch, transformers, triton
print(f"torch {torch.__version__}, triton {triton.__version__}, "
      f"transformers {transformers.__version__}, peft {peft.__version__}, "
      f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}")
PY
workers=()
if [ -n "${WORKERS:-}" ]; then workers=(-n "$WORKERS"); fi
exec python3 -m pytest -q -m gpu "${workers[@]}" "${@:-tests}"
