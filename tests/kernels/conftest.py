"""Lets the kernel tests import their helpers (`moe_lora_cases`) in importlib mode."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
