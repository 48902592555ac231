"""The tile rule: tiles and splits from rows per group, r, K and the number of multiprocessors.

Sizes known to the host only: nothing is searched, or read back from the device, at run time.
TUNING.md says what each number was measured against.
"""

import math
from typing import NamedTuple

# How finely the work is cut, and into how many programs at most; more of it goes in strides.
PROGRAMS_PER_SM = 16
MAX_PROGRAMS_PER_SM = 32


class Gpu(NamedTuple):
    """What the tile rule knows about a GPU."""

    sms: int
    shared: int  # bytes of shared memory that a program's tiles may take


class ShrinkTile(NamedTuple):
    block_r: int
    block_k: int
    split_k: int
    k_per_split: int
    num_warps: int
    num_stages: int


class ExpandTile(NamedTuple):
    block_n: int
    block_r: int
    blocks: int  # blocks of columns that a program goes through with the same rank vectors
    num_warps: int
    num_stages: int


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int, least: int, most: int) -> int:
    """Return n rounded up to a power of two, within [least, most] (powers of two)."""
    return min(most, max(least, 1 << max(0, n - 1).bit_length()))


def expected_groups(num_pairs: int, num_groups: int) -> float:
    """Return how many of the groups `num_pairs` evenly drawn pairs are expected to hit."""
    return num_groups * -math.expm1(-num_pairs / num_groups) if num_groups else 0.0


def prefers_pairs(num_pairs: int, num_groups: int, expected_pairs: int, rank: int) -> bool:
    """Whether to skip the routing: few pairs, of which hardly two share a group's weights.

    Every pair costs programs in proportion to r, whether its expert is here or not: with a large
    r, or under expert parallelism, the limit is lower.
    """
    most = 512 if 2 * expected_pairs >= num_pairs and rank <= 32 else 128
    return num_pairs <= most and expected_pairs < 1.6 * expected_groups(expected_pairs, num_groups)


def choose_block_m(num_pairs: int, num_groups: int, expected_pairs: int, rank: int) -> int:
    """Return the rows of a tile: the smallest that does not cut a typical group too often.

    0 where the pairwise kernels are the better choice.
    """
    if prefers_pairs(num_pairs, num_groups, expected_pairs, rank):
        return 0
    rows = expected_pairs / max(1, min(num_groups, expected_pairs))
    if rows <= 24:
        return 16
    if rows <= (128 if rank > 32 else 512):
        return 32
    # tall tiles only where they still outnumber the multiprocessors of a large GPU
    return 64 if expected_pairs >= 64 * 132 else 32


def _split(in_features: int, block_k: int, splits: int) -> tuple[int, int]:
    """Return (split_k, k_per_split): about `splits` parts of whole blocks, none of them empty."""
    steps = cdiv(in_features, block_k)
    per_split = cdiv(steps, max(1, min(splits, steps)))
    return cdiv(steps, per_split), per_split * block_k


def most_partial_rows(num_pairs: int, sms: int) -> int:
    """Return the bound on the rank vectors of a stage, all splits together."""
    return 4 * num_pairs + 4 * 64 * sms


def pairwise_shrink_tile(num_pairs: int, columns: int, in_features: int, sms: int) -> ShrinkTile:
    """columns: S * r. One block of A per program: long rows, so that there are few partial sums."""
    block_k = power_of_2(in_features, 64, 512 if in_features <= 8192 else 1024)
    while block_k > 256 and cdiv(in_features, block_k) * block_k > 1.2 * in_features:
        block_k //= 2
    few = num_pairs * columns * in_features < 8192 * 2 * sms
    block_r = power_of_2(columns, 4, max(4, (4096 if few else 8192) // block_k))
    splits = min(64, most_partial_rows(num_pairs, sms) // num_pairs)
    split_k, k_per_split = _split(in_features, block_k, splits)
    return ShrinkTile(block_r, block_k, split_k, k_per_split, 4, 1)


def pairwise_expand_tile(
    num_pairs: int, rank: int, out_features: int, slices: int, sms: int
) -> ExpandTile:
    """slices: into how many parts the output columns fall that no block may cross."""
    block_r = power_of_2(rank, 4, 64)
    few = num_pairs * out_features * block_r < 4096 * 2 * sms
    elements = 2048 if few else 4096 if block_r <= 32 else 8192
    block_n = power_of_2(out_features // slices, 32, max(32, elements // block_r))
    return ExpandTile(min(512, block_n), block_r, 1, 4, 1)


def grouped_tiles(expected_pairs: int, num_groups: int, block_m: int) -> int:
    """Return how many tiles to expect in use."""
    groups = expected_groups(expected_pairs, num_groups)
    return max(1, int(max(groups, expected_pairs / block_m + groups / 2)))


def grouped_shrink_tile(
    num_pairs: int, tiles: int, block_m: int, columns: int, in_features: int, gpu: Gpu, item: int
) -> ShrinkTile:
    """tiles: expected in use. columns: S * r. item: bytes of an element."""
    block_r = power_of_2(columns, 16, 128)
    block_k = power_of_2(in_features, 32, 128 if block_m <= 32 else 64)
    stages = 3 if block_k * (block_m + block_r) > 128 * 96 else 4  # so that 3 programs fit
    while stages * block_k * (block_m + block_r) * item > gpu.shared:
        stages, block_k = (stages - 1, block_k) if stages > 2 else (stages, block_k // 2)
    programs = tiles * cdiv(columns, block_r)
    splits = min(cdiv(10 * gpu.sms, programs), most_partial_rows(num_pairs, gpu.sms) // num_pairs)
    split_k, k_per_split = _split(in_features, block_k, splits)
    while split_k > 1 and k_per_split < 4 * block_k:  # a few steps to pipeline
        split_k, k_per_split = _split(in_features, block_k, split_k // 2)
    return ShrinkTile(block_r, block_k, split_k, k_per_split, 4, stages)


def grouped_expand_tile(
    tiles: int, block_m: int, rank: int, features: int, parts: int, slices: int, gpu: Gpu, item: int
) -> ExpandTile:
    """tiles: expected in use. features: output columns of a slice. parts: rows of B per column of a
    block (2 for gate and up together). slices: of A, of which an item owns one."""
    block_r = power_of_2(rank, 16, 64 if block_m > 16 else 128)
    block_n = power_of_2(features, 16, 256 if block_m == 16 and block_r <= 32 else 128)
    # With several blocks of r the loop loads rank vectors too; pipelined, these would fill the
    # shared memory.
    stages = 3 if rank <= block_r else 1
    if item == 4:  # fp32 products are unrolled into scalar ones
        block_n = min(block_n, 64 if block_m == 16 else 32)
    elif rank > block_r:
        block_n = min(block_n, 64)
    while (stages * block_n * parts + 2 * block_m) * block_r * item > gpu.shared:
        stages, block_n = (stages - 1, block_n) if stages > 2 else (stages, block_n // 2)
    per_slice = cdiv(features, block_n)
    # as many blocks per program as leave every multiprocessor 16 programs
    blocks = tiles * slices * per_slice // (PROGRAMS_PER_SM * gpu.sms)
    blocks = cdiv(per_slice, cdiv(per_slice, max(1, min(8, blocks))))
    return ExpandTile(block_n, block_r, blocks, 8 if block_m > 64 else 4, stages)
