"""The tile rule: tiles and splits from rows per group, r, K and the number of multiprocessors.

Sizes known to the host only: nothing is searched, or read back from the device, at run time.
TUNING.md says what each number was measured against.
"""

import math
from typing import NamedTuple

MAX_PROGRAMS_PER_SM = 32  # of a grouped kernel; more work than that goes in strides
# Up to how many pairs the pairwise kernels may take, those elsewhere included.
MOST_PAIRS = 2048
# From how many pairs on these are listed, where most are elsewhere.
LEAST_LISTED = 32
# Elements that pairs may read again because a group is not read once for all of them.
MOST_REPEATED = 60_000_000


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
    prefetch: bool  # whether a block's output is loaded while the one before it is computed


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int, least: int, most: int) -> int:
    """Return n rounded up to a power of two, within [least, most] (powers of two)."""
    return min(most, max(least, 1 << max(0, n - 1).bit_length()))


def expected_groups(num_pairs: int, num_groups: int) -> float:
    """Return how many of the groups `num_pairs` evenly drawn pairs are expected to hit."""
    return num_groups * -math.expm1(-num_pairs / num_groups) if num_groups else 0.0


def prefers_pairs(
    num_pairs: int, num_groups: int, expected_pairs: int, rank: int, group_elements: int
) -> bool:
    """Whether to skip the routing: pairs that hardly share a group's weights.

    Pairs that share a group read it once each: that must cost less than the routing and its launches
    do. Without `group_elements` that cost is not known, and the limits are lower.
    """
    if num_pairs > MOST_PAIRS:
        return False
    if group_elements == 0:
        few = expected_pairs <= (512 if rank <= 32 else 128)
        return few and expected_pairs < 1.6 * expected_groups(expected_pairs, num_groups)
    if expected_pairs < num_pairs:  # popular experts may be here
        expected_pairs = min(num_pairs, 3 * expected_pairs // 2)
    shared = expected_pairs - expected_groups(expected_pairs, num_groups)
    return shared * group_elements < MOST_REPEATED


def lists_pairs(num_pairs: int, expected_pairs: int) -> bool:
    """Whether the pairwise kernels go through a list of the pairs with work, made once per layer.

    That is one more launch, and no programs for the pairs that are elsewhere.
    """
    return LEAST_LISTED <= num_pairs <= MOST_PAIRS and 2 * expected_pairs < num_pairs


def pairs_with_programs(num_pairs: int, expected_pairs: int, rank: int) -> int:
    """Return how many of a list's pairs get programs of their own; further ones take turns.

    More than expected, as popular experts may be here. With a large r, a program that finds no pair
    costs more than one that takes a second.
    """
    if rank <= 32:
        return min(num_pairs, expected_pairs + 3 * math.isqrt(expected_pairs) + 1)
    if expected_pairs < 48:
        return min(num_pairs, expected_pairs + math.isqrt(expected_pairs))
    return min(num_pairs, 9 * expected_pairs // 10)


def choose_block_m(
    num_pairs: int, num_groups: int, expected_pairs: int, rank: int, group_elements: int = 0
) -> int:
    """Return the rows of a tile, or 0 where the pairwise kernels are the better choice.

    group_elements: of the factors of one group, all stages that the choice is for; 0 if unknown.
    """
    if prefers_pairs(num_pairs, num_groups, expected_pairs, rank, group_elements):
        return 0
    return rows_of_a_tile(num_groups, expected_pairs, rank)


def rows_of_a_tile(num_groups: int, expected_pairs: int, rank: int) -> int:
    """Return the smallest tile that does not cut a typical group too often."""
    rows = expected_pairs / max(1, min(num_groups, expected_pairs))
    if rank <= 32:
        return 16 if rows <= 24 else 32
    return 16 if rows <= 12 else 32 if rows <= 40 else 64


def _split(in_features: int, block_k: int, splits: int) -> tuple[int, int]:
    """Return (split_k, k_per_split): about `splits` parts of whole blocks, none of them empty."""
    steps = cdiv(in_features, block_k)
    per_split = cdiv(steps, max(1, min(splits, steps)))
    return cdiv(steps, per_split), per_split * block_k


def most_partial_rows(num_pairs: int, sms: int) -> int:
    """Return the bound on the rank vectors of a stage, all splits together."""
    return 4 * num_pairs + 4 * 64 * sms


def pairwise_shrink_tile(
    num_pairs: int, expected_pairs: int, columns: int, in_features: int, sms: int
) -> ShrinkTile:
    """columns: S * r. One block of A per program: long rows, so that there are few partial sums."""
    block_k = power_of_2(in_features, 64, 512 if in_features <= 8192 else 1024)
    while block_k > 256 and cdiv(in_features, block_k) * block_k > 1.2 * in_features:
        block_k //= 2
    few = expected_pairs * columns * in_features < 8192 * 2 * sms
    block_r = power_of_2(columns, 4, max(4, (4096 if few else 8192) // block_k))
    splits = min(64, most_partial_rows(num_pairs, sms) // num_pairs)
    split_k, k_per_split = _split(in_features, block_k, splits)
    return ShrinkTile(block_r, block_k, split_k, k_per_split, 4, 1)


def pairwise_expand_tile(
    expected_pairs: int, rank: int, out_features: int, slices: int, sms: int
) -> ExpandTile:
    """slices: into how many parts the output columns fall that no block may cross."""
    block_r = power_of_2(rank, 4, 64)
    few = expected_pairs * out_features * block_r < 4096 * 2 * sms
    elements = (1 if few else 2) * (2048 if block_r <= 32 else 4096)
    block_n = min(512, power_of_2(out_features // slices, 32, max(32, elements // block_r)))
    # no more threads than 16-byte loads: two warps with the same values would both store them
    num_warps = 2 if block_n * block_r >= 512 else 1
    return ExpandTile(block_n, block_r, 1, num_warps, 1, False)


def grouped_tiles(expected_pairs: int, num_groups: int, block_m: int) -> int:
    """Return how many tiles to expect in use."""
    groups = expected_groups(expected_pairs, num_groups)
    return max(1, int(max(groups, expected_pairs / block_m + groups / 2)))


def grouped_shrink_tile(
    num_pairs: int, tiles: int, block_m: int, rank: int, slices: int, in_features: int, gpu: Gpu,
    item: int,
) -> ShrinkTile:  # fmt: skip
    """tiles: expected in use. slices: of A. item: bytes of an element."""
    columns = slices * rank
    small = block_m == 16 and rank <= 32  # two warps suffice, and leave room for more programs
    block_r = power_of_2(columns, 16, 128)
    block_k = power_of_2(in_features, 32, 128 if block_m <= 32 else 64)
    # so that at least 3 programs fit
    stages = 3 if small or block_k * (block_m + block_r) > 128 * 96 else 4
    while stages * block_k * (block_m + block_r) * item > gpu.shared:
        stages, block_k = (stages - 1, block_k) if stages > 2 else (stages, block_k // 2)
    programs = tiles * cdiv(columns, block_r)
    splits = cdiv((20 if small else 10 if block_m == 16 else 5) * gpu.sms, programs)
    if block_m > 16 and rank > 32:
        # every split is a set of rank vectors that all programs of the expand read again
        splits = min(splits, max(4, cdiv(gpu.sms, programs)))
    splits = min(splits, most_partial_rows(num_pairs, gpu.sms) // num_pairs)
    split_k, k_per_split = _split(in_features, block_k, splits)
    while split_k > 1 and k_per_split < (2 if small else 4) * block_k:  # a few steps to pipeline
        split_k, k_per_split = _split(in_features, block_k, split_k // 2)
    return ShrinkTile(block_r, block_k, split_k, k_per_split, 2 if small else 4, stages)


def _expand_block(
    block_m: int, rank: int, most_n: int, features: int, parts: int, gpu: Gpu, item: int
) -> tuple[int, int, int]:
    """Return (block_n, block_r, stages): at most `most_n` columns, and what fits."""
    block_r = power_of_2(rank, 16, 64 if block_m > 16 else 128)
    block_n = power_of_2(features, 16, most_n)
    # With several blocks of r the loop loads rank vectors too; pipelined, these would fill the
    # shared memory.
    stages = 3 if rank <= block_r else 1
    if item == 4:  # fp32 products are unrolled into scalar ones
        block_n = min(block_n, 64 if block_m == 16 else 32)
    elif rank > block_r:
        block_n = min(block_n, 64)
    while (stages * block_n * parts + 2 * block_m) * block_r * item > gpu.shared:
        stages, block_n = (stages - 1, block_n) if stages > 2 else (stages, block_n // 2)
    return block_n, block_r, stages


def _blocks(blocks: int, per_slice: int) -> int:
    """Return about `blocks`, so that a slice's programs have equally many."""
    return cdiv(per_slice, cdiv(per_slice, max(1, min(per_slice, blocks))))


def grouped_expand_tile(
    tiles: int, block_m: int, rank: int, features: int, parts: int, slices: int, gpu: Gpu, item: int
) -> ExpandTile:
    """tiles: expected in use. features: output columns of a slice. parts: rows of B per column of a
    block (2 for gate and up together). slices: of A, of which an item owns one."""
    # short slices: smaller blocks, so that the work falls into more programs
    most_n = 64 if block_m > 16 and rank > 32 and features <= 1024 else 128
    block_n, block_r, stages = _expand_block(block_m, rank, most_n, features, parts, gpu, item)
    per_slice = cdiv(features, block_n)
    programs = (8 if block_m == 16 else 4) * gpu.sms
    # at least 2, so that the next block's output can be on its way while one is computed
    blocks = _blocks(max(2, tiles * slices * per_slice // programs), per_slice)
    # short tiles with a large r are bound by B's bytes: registers serve better as more programs
    prefetch = blocks > 1 and (block_m > 16 or rank <= 32)
    return ExpandTile(block_n, block_r, blocks, 4, stages, prefetch)


def activation_tile(
    tiles: int, block_m: int, rank: int, features: int, parts: int, gpu: Gpu, item: int
) -> ExpandTile:
    """As `grouped_expand_tile`, for the kernel that ends in the activation; block_n columns of it."""
    most_n = 256 if block_m == 16 and rank <= 32 else 128
    block_n, block_r, stages = _expand_block(block_m, rank, most_n, features, parts, gpu, item)
    block_n = max(16, block_n // parts)
    per_slice = cdiv(features, block_n)
    programs = (16 if rank <= 32 else 8) * gpu.sms
    blocks = _blocks(tiles * per_slice // programs, per_slice)
    return ExpandTile(block_n, block_r, blocks, 4, stages, False)
