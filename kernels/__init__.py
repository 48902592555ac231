"""LoRA kernels for mixture-of-experts layers.

Importing this package imports neither Triton nor any kernel and registers no operator: names are
resolved on first use, so that it is harmless wherever something else imports it by accident.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "ArgumentError": "errors",
    "KernelUnavailableError": "errors",
    "MoeLoraRouting": "routing",
    "MoeLoraWorkspace": "workspace",
    "allocate_workspace": "workspace",
    "build_routing": "routing",
    "virtual_expert_ids": "routing",
    "fused_moe_lora": "fused",
    "fused_moe_lora_activation": "activation",
    "fused_moe_lora_combine": "combine",
    "fused_moe_lora_reference": "reference",
    "fused_moe_lora_activation_reference": "reference",
    "fused_moe_lora_combine_reference": "reference",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
