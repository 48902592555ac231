"""What `build_routing` is told: checks, and the tile rule's answer, looked up by repeated calls."""

import functools
from typing import Any

import torch

from .argument_types import check_count
from .arguments import INT_DTYPES
from .errors import ArgumentError
from .tiles import cdiv, choose_block_m

BLOCKS_M = (0, 16, 32, 64)
MAX_CACHED = 4096  # plans, launches and answers of the rule, by shape


def remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    """Keep the value for calls with the same key, if there is one, and return it."""
    if key is not None:
        if len(known) >= MAX_CACHED:
            known.clear()
        known[key] = value
    return value


def check_ids(topk_ids: torch.Tensor, token_lora_mapping: torch.Tensor) -> None:
    """Raise unless both are ids of the same tokens, on one device."""
    for name, ids in (("topk_ids", topk_ids), ("token_lora_mapping", token_lora_mapping)):
        if not isinstance(ids, torch.Tensor) or ids.dtype not in INT_DTYPES:
            raise ArgumentError(name, "a tensor of int32 or int64", _what(ids))
        if ids.layout != torch.strided:
            raise ArgumentError(name, "a dense tensor", str(ids.layout))
    if topk_ids.dim() != 2:
        raise ArgumentError("topk_ids", "shape (T, K)", _what(topk_ids))
    if token_lora_mapping.shape != topk_ids.shape[:1]:
        raise ArgumentError(
            "token_lora_mapping", f"shape ({topk_ids.shape[0]},)", _what(token_lora_mapping)
        )
    if token_lora_mapping.device != topk_ids.device:
        raise ArgumentError(
            "token_lora_mapping", f"device {topk_ids.device}", str(token_lora_mapping.device)
        )


def _what(ids: object) -> str:
    if isinstance(ids, torch.Tensor):
        return f"{ids.dtype} {tuple(ids.shape)}"
    return type(ids).__name__


def check_sizes(
    num_tokens: int, top_k: int, num_adapters: int, num_local_experts: int,
    num_global_experts: int | None, rank: int, group_elements: int, block_m: int | None,
) -> int:  # fmt: skip
    """Raise `ArgumentError`, or return how many pairs to expect here."""
    check_count("num_adapters", num_adapters)
    check_count("num_local_experts", num_local_experts)
    check_count("rank", rank)
    check_count("group_elements", group_elements)
    if block_m is not None and (block_m not in BLOCKS_M or not isinstance(block_m, int)):
        raise ArgumentError("block_m", f"one of {BLOCKS_M}", repr(block_m))
    if num_global_experts is None:
        return num_tokens * top_k
    check_count("num_global_experts", num_global_experts)
    share = max(1, num_local_experts, num_global_experts)
    return cdiv(num_tokens * top_k * num_local_experts, share)


def known_rule(*told: Any) -> tuple[int, int]:
    """Return (expected pairs, block_m); what was told is checked, and looked at once."""
    try:
        return _rule(*told)
    except TypeError:  # something that cannot be looked up, and is no size
        return _rule.__wrapped__(*told)


@functools.lru_cache(MAX_CACHED, typed=True)
def _rule(
    num_tokens: int, top_k: int, num_adapters: int, num_local_experts: int,
    num_global_experts: int | None, rank: int, group_elements: int, block_m: int | None,
) -> tuple[int, int]:  # fmt: skip
    sizes = (num_tokens, top_k, num_adapters, num_local_experts)
    expected = check_sizes(*sizes, num_global_experts, rank, group_elements, block_m)
    if block_m is None:
        block_m = rule_of(*sizes, expected, rank, group_elements)
    return expected, block_m


def rule_of(
    num_tokens: int, top_k: int, num_adapters: int, num_local_experts: int,
    expected_pairs: int, rank: int, group_elements: int,
) -> int:  # fmt: skip
    """Return the block_m that the tile rule gives a routing."""
    return choose_block_m(
        num_tokens * top_k, num_adapters * num_local_experts, expected_pairs, rank, group_elements
    )
