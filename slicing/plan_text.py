"""A plan as text, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moelora.slicing.formats.reading import shorten

if TYPE_CHECKING:
    from moelora.slicing.plan import PlannedModule, ShardPlan

# Said wherever only config and headers were looked at: no fault found is less there.
VALUES_NOT_READ = "values: not read; shard looks for NaN and Inf when it writes"


def human_bytes(count: float) -> str:
    """Return a size with a binary unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def ids_text(ids: list[int]) -> str:
    """Return expert ids as ``0-63 (64)``."""
    return f"{shorten(ids)} ({len(ids)})" if ids else "none"


def plan_text(plan: ShardPlan) -> str:
    """Return the plan as ``--dry-run`` prints it: ranks, then one line per kind of module."""
    layout = plan.layout
    lines = [
        f"{plan.adapter.name_or_path} on {plan.base.name_or_path} ({plan.base.model_type})",
        (
            f"tp {layout.tp_size}, ep {layout.moe_ep_size}, moe_tp {layout.moe_tp_size}, "
            f"moe_dp {layout.moe_dp_size}, {layout.rank_order}, "
            f"experts {plan.expert_placement.kind}, dtype {plan.dtype}"
        ),
        "",
        "tp_rank  moe_ep_rank  moe_tp_rank  experts                size",
    ]
    owned = {tuple(map(tuple, p.owned)) for p in plan.modules if p.module.is_expert}
    for coords in layout.all_coords():
        if not owned:
            experts = "-"
        elif len(owned) == 1:
            experts = ids_text(list(next(iter(owned))[coords.moe_ep_rank]))
        else:
            experts = "differ by layer"
        lines.append(
            f"{coords.tp_rank:7d}  {coords.moe_ep_rank:11d}  {coords.moe_tp_rank:11d}  "
            f"{experts:21s}  {human_bytes(plan.rank_bytes(coords.tp_rank))}"
        )
    lines += ["", *_module_lines(plan)]
    if plan.skips:
        lines += ["", "skipped:"]
        layers: dict[tuple[str, str], list[int]] = {}
        for skip in plan.skips:
            layers.setdefault((skip.what, skip.reason), []).append(
                -1 if skip.layer is None else skip.layer
            )
        lines += [
            f"  {what}: {reason}" + ("" if found == [-1] else f", layers {shorten(found)}")
            for (what, reason), found in sorted(layers.items())
        ]
    lines += ["", VALUES_NOT_READ]
    return "\n".join(lines)


def _module_lines(plan: ShardPlan) -> list[str]:
    kinds: dict[tuple[str, str, int, str, str], list[PlannedModule]] = {}
    for planned in plan.modules:
        shapes = [
            " -> ".join(
                str(list(shape))
                for shape in (
                    factor.shape,
                    planned.slice_of(letter, plan.layout, plan.layout.coords(0)).shape,
                )
            )
            for letter, factor in planned.module.factors()
        ]
        key = (
            planned.module.base.name,
            planned.placement.role,
            planned.module.r,
            shapes[0],
            shapes[1],
        )
        kinds.setdefault(key, []).append(planned)
    lines = []
    for (name, role, r, a, b), members in sorted(kinds.items()):
        layers = [m.module.base.layer for m in members]
        known = [layer for layer in layers if layer is not None]
        where = f"layers {shorten(known)}" if known else ""
        lines.append(f"{name}: {role}, r {r}, {len(members)} modules {where}".rstrip())
        lines.append(f"  lora_A {a}, lora_B {b}: {members[0].placement.reason}")
    return lines
