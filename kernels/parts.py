"""What several kernels share: alignment, the routing's buffer, B times the rank vectors, factors of rows.

Letters as in grouped.py.
"""

import triton
import triton.language as tl

ROUTING_HEADER = tl.constexpr(8)  # routing.ROUTING_HEADER


@triton.jit
def aligned(value, MULTIPLE: tl.constexpr):
    """Return the value, of which the compiler then knows that MULTIPLE divides it.

    Triton looks by itself whether 16 does. Rows of 8 or 24 elements would else be loaded one element
    at a time, and not ahead of their use.
    """
    if MULTIPLE > 1:
        value = value // MULTIPLE * MULTIPLE
    return value


@triton.jit
def pair_list(routing_ptr):
    """Return a pointer to the list of pairs with work, 64-bit words, of a routing without tiles."""
    return (routing_ptr + ROUTING_HEADER).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def load_tile(routing_ptr, tile, num_pairs, tile_capacity):
    """Return (virtual expert, first position, rows) of a tile."""
    tiles_ptr = routing_ptr + ROUTING_HEADER + num_pairs + tile
    virtual_id = tl.load(tiles_ptr)
    position = tl.load(tiles_ptr + tile_capacity)
    rows = tl.load(tiles_ptr + 2 * tile_capacity)
    return virtual_id, position, rows


@triton.jit
def load_b(b_rows, mask_n, RANK: tl.constexpr, BLOCK_R: tl.constexpr, START: tl.constexpr):
    """Return columns [START, START + BLOCK_R) of B's rows, (rows, BLOCK_R)."""
    offs_r = START + tl.arange(0, BLOCK_R)
    mask = mask_n[:, None]
    if START + BLOCK_R > RANK:
        mask &= (offs_r < RANK)[None, :]
    return tl.load(b_rows[:, None] + offs_r[None, :], mask=mask, other=0.0)


@triton.jit
def load_y(
    y_rows, plane, mask_m,
    RANK: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_R: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Return columns [START, START + BLOCK_R) of the rank vectors, summed over splits in fp32."""
    offs_r = START + tl.arange(0, BLOCK_R)
    mask = mask_m[:, None]
    if START + BLOCK_R > RANK:
        mask &= (offs_r < RANK)[None, :]
    y_ptrs = y_rows[:, None] + offs_r[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT_K):
        y += tl.load(y_ptrs + split * plane, mask=mask, other=0.0)
    return y


@triton.jit
def expand_dot(
    y_first,  # (BLOCK_M, BLOCK_R), the first columns of y, in B's type
    y_rows,  # (BLOCK_M,) pointers to the rows of y, at the columns of the A slice
    b_rows,  # (BLOCK_N,) pointers to the rows of B
    mask_m,
    mask_n,
    plane,  # elements of one split of y
    RANK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return y @ B.T, (BLOCK_M, BLOCK_N) in fp32."""
    b = load_b(b_rows, mask_n, RANK, BLOCK_R, 0)
    acc = tl.dot(y_first, tl.trans(b), input_precision="ieee")
    for start in tl.static_range(BLOCK_R, RANK, BLOCK_R):
        b = load_b(b_rows, mask_n, RANK, BLOCK_R, start)
        y = load_y(y_rows, plane, mask_m, RANK, SPLIT_K, BLOCK_R, start)
        acc = tl.dot(y.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def load_factors(
    token, k, mask_m, scaling_value, scaling_ptr, topk_weights_ptr, slot, expert, a_slice,
    stride_sl, stride_se, stride_ss, stride_wt, stride_wk,
    USE_SCALING_TENSOR: tl.constexpr, USE_TOPK_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Return what each row's delta is multiplied with, fp32."""
    factors = tl.where(mask_m, 1.0, 0.0) * scaling_value
    if USE_SCALING_TENSOR:
        factors *= tl.load(
            scaling_ptr + slot * stride_sl + expert * stride_se + a_slice * stride_ss
        )
    if USE_TOPK_WEIGHTS:
        offs_w = token * stride_wt + k * stride_wk
        factors *= tl.load(topk_weights_ptr + offs_w, mask=mask_m, other=0.0).to(tl.float32)
    return factors
