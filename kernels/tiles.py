"""The tile rule: sizes of tiles and splits from rows per group, r, K and the number of SMs.

Host-known sizes only: nothing is searched or read back at run time.
"""

import functools
from typing import NamedTuple

import torch


class ShrinkTile(NamedTuple):
    block_r: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


class ExpandTile(NamedTuple):
    block_n: int
    block_r: int
    num_warps: int
    num_stages: int


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; 132 where there is no GPU to ask."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose_block_m(num_pairs: int, num_groups: int) -> int:
    """Return the rows of a tile: the smallest that does not cut a typical group too often."""
    rows = num_pairs / max(1, min(num_groups, num_pairs))
    if rows <= 24:
        return 16
    return 32 if rows <= 64 else 64


def shrink_tile(block_m: int, columns: int, in_features: int, tiles: int, sms: int) -> ShrinkTile:
    """columns: S * r. tiles: an estimate of the tiles in use."""
    block_r = min(128, max(16, next_power_of_2(columns)))
    block_k = 128 if block_r <= 64 else 64
    steps = -(-in_features // block_k)
    programs = tiles * -(-columns // block_r)
    split_k = 1
    while split_k < 16 and programs * split_k < 2 * sms and steps >= 4 * split_k:
        split_k *= 2
    return ShrinkTile(block_r, block_k, split_k, 4, 3)


def expand_tile(block_m: int, rank: int, columns: int) -> ExpandTile:
    """columns: the output columns that one A slice feeds."""
    block_n = min(128, max(16, next_power_of_2(columns)))
    return ExpandTile(block_n, min(64, max(16, next_power_of_2(rank))), 4, 2)
