"""The tile rule: whatever the sizes, tiles fit, splits are not empty and the workspace suffices."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moelora.kernels import tiles
from moelora.kernels.tiles import Gpu, cdiv

GPUS = [Gpu(132, 215 << 10), Gpu(40, 52 << 10), Gpu(108, 151 << 10)]


def check_split(tile: tiles.ShrinkTile, in_features: int) -> None:
    assert tile.k_per_split % tile.block_k == 0
    assert (tile.split_k - 1) * tile.k_per_split < in_features <= tile.split_k * tile.k_per_split


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    pairs=st.integers(1, 300_000),
    groups=st.integers(1, 20_000),
    rank=st.integers(1, 256),
    slices=st.sampled_from([1, 2]),
    in_features=st.integers(1, 20_000),
    out_features=st.integers(2, 30_000),
    block_m=st.sampled_from([16, 32, 64]),
    item=st.sampled_from([2, 4]),
    gpu=st.sampled_from(GPUS),
)
def test_any_sizes(
    pairs: int, groups: int, rank: int, slices: int, in_features: int, out_features: int,
    block_m: int, item: int, gpu: Gpu,
) -> None:  # fmt: skip
    columns, most = slices * rank, tiles.most_partial_rows(pairs, gpu.sms)
    in_use = tiles.grouped_tiles(pairs, groups, block_m)
    shrink = tiles.grouped_shrink_tile(pairs, in_use, block_m, rank, slices, in_features, gpu, item)
    check_split(shrink, in_features)
    assert shrink.split_k * pairs <= most
    held = shrink.num_stages * shrink.block_k * (block_m + shrink.block_r) * item
    assert held <= gpu.shared and shrink.block_k >= 16
    features = cdiv(out_features, slices)
    expand = tiles.grouped_expand_tile(in_use, block_m, rank, features, 1, slices, gpu, item)
    held = (expand.num_stages * expand.block_n + 2 * block_m) * expand.block_r * item
    assert held <= gpu.shared and expand.block_n >= 16
    assert 1 <= expand.blocks <= cdiv(features, expand.block_n)
    act = tiles.activation_tile(in_use, block_m, rank, features, 2, gpu, item)
    held = (act.num_stages * act.block_n * 2 + 2 * block_m) * act.block_r * item
    assert act.block_n == 16 or held <= gpu.shared
    assert 1 <= act.blocks <= cdiv(features, act.block_n)
    pairs = min(pairs, 1024)
    pairwise = tiles.pairwise_shrink_tile(pairs, pairs, columns, in_features, gpu.sms)
    check_split(pairwise, in_features)
    assert pairwise.split_k * pairs <= tiles.most_partial_rows(pairs, gpu.sms)


def test_decode_needs_no_routing_and_prefill_takes_taller_tiles() -> None:
    choose = tiles.choose_block_m
    assert choose(8, 1024, 8, 16) == 0  # one token, 8 adapters x 128 experts
    assert choose(512, 1024, 512, 16) == 0 and choose(512, 1024, 512, 64) == 16
    assert choose(512, 128, 512, 16) == 16  # four pairs share a group
    assert choose(65536, 128, 65536, 16) == 32 and choose(65536, 128, 65536, 64) == 64
    assert choose(512, 256, 64, 16) == 0  # most experts elsewhere: few pairs are left
    assert choose(4096, 256, 256, 16) == 16  # too many to list
    # 28 of 128 pairs share a group: cheap to read twice where experts are small, not where not
    assert choose(128, 256, 128, 64, 500_000) == 0 and choose(128, 256, 128, 64, 3_500_000) == 16
    # with small experts, a group can be read several times at less than the routing costs
    assert choose(256, 128, 256, 16, 135_000) == 0 and choose(1024, 128, 1024, 16, 135_000) == 16
    assert choose(2048, 4096, 2048, 16, 135_000) == 0
    # 64 of 512 pairs: popular experts may bring half as many again, which would then share groups
    assert choose(64, 64, 64, 16, 2_000_000) == 0 and choose(512, 64, 64, 16, 2_000_000) == 16


def test_a_list_gives_programs_to_about_the_pairs_that_are_expected() -> None:
    programs = tiles.pairs_with_programs
    assert 64 < programs(512, 64, 16) < 100  # popular experts may be here
    assert 50 < programs(512, 64, 64) < 64  # one that finds no pair costs more than a second turn
    assert programs(40, 19, 8) <= 40
