"""Ranks, and which experts and which slices they own: the only file that does rank arithmetic.

Sources: SHARD_FORMAT, section "Ranks". SGLang orders the ranks ``ep_major`` and TensorRT-LLM
``tp_major``; the two agree when ``moe_ep_size`` is 1 or ``tp_size``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moelora.slicing.bounded_json import read_json_object
from moelora.slicing.errors import InputError, NotDivisibleError, UsageError

RankOrder = Literal["ep_major", "tp_major"]
RANK_ORDERS = ("ep_major", "tp_major")
# A file per rank and a table entry per rank: beyond any deployment, a slip of the keyboard.
MAX_RANKS = 4096


@dataclass(frozen=True)
class RankCoords:
    """Where one outer ``tp_rank`` stands on each axis of the MoE layers."""

    tp_rank: int
    moe_ep_rank: int
    moe_tp_rank: int
    moe_dp_rank: int


def divisors_near(size: int, wanted: int) -> list[int]:
    """Return the divisors of ``size`` up to twice ``wanted``: the values that would work.

    Only up to ``MAX_RANKS``, as a layout has no more.
    """
    return [d for d in range(1, min(size, 2 * wanted, MAX_RANKS) + 1) if size % d == 0]


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of a deployment. Expert parallelism lives inside tensor parallelism.

    Raises:
        UsageError: a size is not in 1..``MAX_RANKS``, or ``moe_ep_size * moe_dp_size`` does not divide
            ``tp_size``, or ``tp_major`` is combined with ``moe_dp_size > 1``.
    """

    tp_size: int
    moe_ep_size: int = 1
    moe_dp_size: int = 1
    rank_order: RankOrder = "ep_major"

    def __post_init__(self) -> None:
        for flag, size in (
            ("--tp", self.tp_size),
            ("--ep", self.moe_ep_size),
            ("--moe-dp", self.moe_dp_size),
        ):
            if type(size) is not int or size < 1:
                raise UsageError(f"{flag} must be at least 1, got {size!r}")
            if size > MAX_RANKS:
                raise UsageError(f"{flag} must be at most {MAX_RANKS} ranks")
        if self.rank_order not in RANK_ORDERS:
            raise UsageError(f"--rank-order must be one of {RANK_ORDERS}, got {self.rank_order!r}")
        if self.tp_size % (self.moe_ep_size * self.moe_dp_size):
            fits = [d for d in divisors_near(self.tp_size, self.tp_size)]
            raise UsageError(
                f"--tp {self.tp_size} is not divisible by --ep {self.moe_ep_size}"
                + (f" times --moe-dp {self.moe_dp_size}" if self.moe_dp_size > 1 else ""),
                hint=f"expert parallelism lives inside tensor parallelism: ep times moe-dp must "
                f"be one of {fits}",
            )
        if self.rank_order == "tp_major" and self.moe_dp_size > 1:
            raise UsageError(
                "--rank-order tp_major has no --moe-dp",
                hint="TensorRT-LLM's order knows no data parallelism over experts; use ep_major",
            )

    @property
    def moe_tp_size(self) -> int:
        """Ranks that share one expert, each holding a slice of its intermediate dim."""
        return self.tp_size // (self.moe_ep_size * self.moe_dp_size)

    def coords(self, tp_rank: int) -> RankCoords:
        """Return the place of outer rank ``tp_rank`` on the expert axes."""
        if self.rank_order == "tp_major":
            ep_rank, moe_tp_rank = tp_rank % self.moe_ep_size, tp_rank // self.moe_ep_size
            return RankCoords(tp_rank, ep_rank, moe_tp_rank, 0)
        group, moe_tp_rank = divmod(tp_rank, self.moe_tp_size)
        moe_dp_rank, ep_rank = divmod(group, self.moe_ep_size)
        return RankCoords(tp_rank, ep_rank, moe_tp_rank, moe_dp_rank)

    def all_coords(self) -> list[RankCoords]:
        """Return the coordinates of every outer rank, in order."""
        return [self.coords(rank) for rank in range(self.tp_size)]


@dataclass(frozen=True)
class ExpertPlacement:
    """Which global expert ids each ``moe_ep_rank`` owns.

    kind: ``linear``, ``round_robin`` or ``custom``. ``table`` (custom only) maps a layer, or
    ``"*"``, to one list of global ids per EP rank; an id may stand on several ranks.
    """

    kind: str = "linear"
    table: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    allow_uneven: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "round_robin", "custom"):
            raise InputError(
                f"expert placement {self.kind!r}: expected linear, round_robin or a table"
            )

    @classmethod
    def parse(cls, text: str, *, allow_uneven: bool = False) -> ExpertPlacement:
        """Return the placement that ``--expert-placement`` names: a kind or a JSON file."""
        if text in ("linear", "round_robin"):
            return cls(text, allow_uneven=allow_uneven)
        hint = 'a file holds {"*": [[0, 1], [2, 3]]}: for every layer one list per EP rank'
        if not os.path.isfile(text):
            raise UsageError(
                f"--expert-placement {text}: neither linear, round_robin nor a file", hint=hint
            )
        raw, _ = read_json_object(Path(text), hint=hint)
        return cls.from_table(raw, where=text)

    @classmethod
    def from_table(cls, raw: Any, *, where: str) -> ExpertPlacement:
        """Return a custom placement from ``{layer or "*": [[ids of rank 0], ...]}``."""
        good = isinstance(raw, dict) and all(
            isinstance(ranks, list)
            and ranks
            and all(isinstance(ids, list) and all(_is_id(i) for i in ids) for ids in ranks)
            for ranks in raw.values()
        )
        if not good or not raw:
            raise InputError(
                f"{where}: an expert placement is an object of layer (or '*') to one list of "
                "global expert ids per EP rank",
                hint='for example {"*": [[0, 1], [2, 3]]}',
            )
        for layer in raw:
            if layer != "*" and not re.fullmatch(r"0|[1-9][0-9]*", layer):
                raise InputError(f"{where}: {layer!r} is neither a layer number nor '*'")
        table = tuple((layer, tuple(tuple(ids) for ids in raw[layer])) for layer in sorted(raw))
        return cls("custom", table)

    def to_json(self) -> str | dict[str, list[list[int]]]:
        """Return what the manifest holds: the kind, or the custom table."""
        if self.kind != "custom":
            return self.kind
        return {layer: [list(ids) for ids in ranks] for layer, ranks in self.table}

    def owned(self, num_experts: int, layout: ParallelLayout, layer: int | None) -> list[list[int]]:
        """Return, per ``moe_ep_rank``, the global ids it owns in ``layer``.

        Raises:
            NotDivisibleError: ``linear`` with experts left over and not ``allow_uneven``.
            InputError: a custom table that misses a layer, a rank or an expert.
        """
        ep = layout.moe_ep_size
        if self.kind == "round_robin":
            return [list(range(rank, num_experts, ep)) for rank in range(ep)]
        if self.kind == "custom":
            return self._custom(num_experts, ep, layer)
        base, rem = divmod(num_experts, ep)
        if rem and not self.allow_uneven:
            raise NotDivisibleError(
                f"{num_experts} experts do not divide over --ep {ep}",
                hint=f"--ep values that work: {self._that_work(num_experts, layout)}; "
                "--allow-uneven-experts gives the first ranks one more (SGLang and TensorRT-LLM "
                "refuse that)",
                num_experts=num_experts,
                moe_ep_size=ep,
            )
        starts = [rank * base + min(rank, rem) for rank in range(ep + 1)]
        return [list(range(starts[rank], starts[rank + 1])) for rank in range(ep)]

    @staticmethod
    def _that_work(num_experts: int, layout: ParallelLayout) -> list[int]:
        """Return the sizes near the wanted one that divide the experts and the layout's ranks."""
        ranks = layout.tp_size // layout.moe_dp_size
        return [ep for ep in divisors_near(num_experts, layout.moe_ep_size) if ranks % ep == 0]

    def _custom(self, num_experts: int, ep: int, layer: int | None) -> list[list[int]]:
        rows = dict(self.table)
        ranks = rows.get(str(layer), rows.get("*"))
        where = f"expert placement, layer {layer}"
        if ranks is None:
            raise InputError(f"{where}: missing", hint="add the layer, or '*' for all others")
        if len(ranks) != ep:
            raise InputError(f"{where}: {len(ranks)} lists for {ep} EP ranks")
        seen = {i for ids in ranks for i in ids}
        missing, extra = set(range(num_experts)) - seen, seen - set(range(num_experts))
        doubled = [rank for rank, ids in enumerate(ranks) if len(set(ids)) != len(ids)]
        if missing or extra or doubled:
            raise InputError(
                f"{where}: experts missing {sorted(missing)}, unknown {sorted(extra)} "
                f"(the layer has {num_experts}), named twice on EP ranks {doubled}",
                hint="every expert stands on at least one rank, and at most once on each",
            )
        return [list(ids) for ids in ranks]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Cut:
    """A run of neighbouring rows (or columns) that the ranks share out on its own.

    size: rows in the run. units: parts that must stay whole (heads, or single rows).
    replicate: with fewer units than ranks each unit stands on several neighbouring ranks.
    what: what the units are, for messages. is_vocabulary: shared out as SGLang does, in equal
        runs of the padded vocabulary, of which the last ones may be shorter or empty.
    """

    size: int
    units: int
    what: str
    replicate: bool = False
    is_vocabulary: bool = False


def cut_ranges(cuts: tuple[Cut, ...], parts: int, index: int) -> list[tuple[int, int]]:
    """Return the half-open ranges of one dim that part ``index`` of ``parts`` owns, one per cut.

    With fewer units than parts each unit stands on ``parts // units`` neighbouring parts
    (key/value heads: SGLang layers.py:757-789, vLLM linear.py:1066-1071).
    """
    ranges, offset = [], 0
    for cut in cuts:
        if cut.is_vocabulary:
            start, stop = vocabulary_range(cut.size, parts, index)
            ranges.append((offset + start, offset + stop))
            offset += cut.size
            continue
        if parts <= cut.units:
            share = cut.size // parts
            start = offset + index * share
        else:
            share = cut.size // cut.units
            start = offset + index // (parts // cut.units) * share
        ranges.append((start, start + share))
        offset += cut.size
    return ranges


def vocabulary_range(vocab_size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the rows of the vocabulary that a rank owns, padding left out.

    The vocabulary is padded to a multiple of 64, or of ``64 * parts`` where that does not
    divide. Source: SGLang layers/vocab_parallel_embedding.py:271-380.
    """
    padded = -(-vocab_size // 64) * 64
    if padded % parts:
        padded = -(-vocab_size // (64 * parts)) * 64 * parts
    share = padded // parts
    return min(index * share, vocab_size), min((index + 1) * share, vocab_size)


def cut_works(cut: Cut, parts: int) -> bool:
    """Return whether a cut can be shared out over ``parts`` ranks."""
    if cut.is_vocabulary:
        return True
    if cut.units < 1 or cut.size % cut.units:
        return False
    return cut.units % parts == 0 or (cut.replicate and parts % cut.units == 0)


def parse_ranks(text: str, tp_size: int) -> list[int]:
    """Return the ranks that ``--ranks`` names, such as ``0,3-5``."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--ranks {text!r} is not a list such as 0,3-5")
        if last >= tp_size:
            raise UsageError(f"--ranks {text!r}: {last} is outside 0..{tp_size - 1}")
        ranks.update(range(first, last + 1))
    return sorted(ranks)
