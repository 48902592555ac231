"""The unsharded reference: the base with the file's own deltas, and nothing of the shards.

Deltas are computed in float64. A module's weights are replaced only while it runs, so that a
large model needs no second copy; it then computes in fp32, since rounding a merged weight to
bf16 would lose part of a small delta and blame the shards for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.validate.expert_stacks import stacks_of
from moelora.validate.file_witness import FileWitness
from moelora.validate.merged_experts import MergedExperts, looping


def plain_delta(witness: FileWitness, path: str, device: torch.device | str) -> torch.Tensor | None:
    """Return the delta ``(out, in)`` of a plain module in float64; None where there is none."""
    found = witness.linear(path)
    if found is None:
        return None
    a, b, scaling = found
    return b.to(device) @ a.to(device) * scaling


def merged_weight(
    weight: torch.Tensor, planned: PlannedModule, witness: FileWitness
) -> torch.Tensor:
    """Return the base weight plus the file's delta, in fp32 and in the weight's own storage."""
    base = planned.module.base
    if base.kind != "expert":
        delta = plain_delta(witness, planned.path, weight.device)
        if delta is None:
            return weight.float()
        if base.kind == "embedding":
            delta = delta.T
        return (weight.double() + delta).float()
    total = weight.to(torch.float32, copy=True)
    view = total.view(base.num_experts, -1, total.shape[-1]) if base.flat else total
    stacks = stacks_of(witness, base)
    if stacks is None:
        return total
    for first, delta in stacks.deltas(weight.device):
        own = delta.transpose(1, 2) if base.transposed else delta
        some = view[first : first + len(own)]
        some.copy_(some.double() + own)
    return total


class Unsharded:
    """Hooks that give each adapted module its merged weights for the time of its forward.

    witness None: the base's own weights, in fp32; what that changes is rounding alone.
    compute: the type to compute in. The model's own rounds the merged weights, so what that
    changes is rounding too.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        witness: FileWitness | None,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.witness = witness
        self.compute = compute
        self.owners: dict[str, list[PlannedModule]] = {}
        for planned in plan.modules:
            self.owners.setdefault(called_path(planned), []).append(planned)
        self.saved: dict[str, _Saved] = {}
        self.unused = set(self.owners)
        self.looping: set[nn.Module] = set()

    @contextmanager
    def installed(self) -> Iterator[Unsharded]:
        """Run the model with the file's deltas for the time of the block."""
        handles, modules = [], {path: self.model.get_submodule(path) for path in self.owners}
        experts = [modules[path] for path, some in self.owners.items() if some[0].module.is_expert]
        try:
            for path, module in modules.items():
                handles.append(
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True)
                )
                # before the hook that takes a streamed weight off the device again
                handles.append(module.register_forward_hook(self._after(path), prepend=True))
            with looping(experts) as self.looping:
                yield self
        finally:
            for handle in handles:
                handle.remove()
            for path in list(self.saved):  # a forward that raised never came to its end
                self._restore(path)

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.unused.discard(path)
            if path in self.saved:  # its last forward raised
                self._restore(path)
            own = dict(module.named_parameters())
            saved = self.saved[path] = _Saved(next(iter(own.values())).dtype)
            adapted = {parameter_path(p).removeprefix(path + "."): p for p in self.owners[path]}
            for name, parameter in own.items():
                planned = adapted.get(name)
                if module in self.looping and parameter.dim() == 3:
                    vars(module)[name] = self._experts(parameter.data, planned)
                    continue
                data = parameter.data  # never two copies of a layer's experts
                if planned is not None and self.witness is not None:
                    data = merged_weight(data, planned, self.witness)
                data = data.to(self.compute)
                saved.replaced[name] = (parameter.data, data)
                parameter.data = data
            return _cast(args, self.compute), _cast(kwargs, self.compute)

        return hook

    def _experts(self, weight: torch.Tensor, planned: PlannedModule | None) -> MergedExperts:
        stacks = None
        if planned is not None and self.witness is not None:
            stacks = stacks_of(self.witness, planned.module.base)
        return MergedExperts(weight, stacks, self.compute)

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            dtype = self.saved[path].dtype
            self._restore(path)
            return _cast(output, dtype)

        return hook

    def _restore(self, path: str) -> None:
        module = self.model.get_submodule(path)
        for name in [n for n, value in vars(module).items() if isinstance(value, MergedExperts)]:
            del vars(module)[name]
        parameters = dict(module.named_parameters())
        for name, (own, put) in self.saved.pop(path).replaced.items():
            # where a streamed weight has left the device again, its placeholder stays
            if parameters[name].data_ptr() == put.data_ptr():
                parameters[name].data = own


@dataclass
class _Saved:
    """The type of a module, and per parameter its own data and what was put in its place."""

    dtype: torch.dtype
    replaced: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def owner_path(planned: PlannedModule) -> str:
    """Return the path of the module whose parameter a delta adds to."""
    return planned.path.rpartition(".")[0] if planned.module.is_expert else planned.path


def called_path(planned: PlannedModule) -> str:
    """Return the path of the module that is called: DBRX's weights stand in one inside it."""
    path = owner_path(planned)
    return path.rpartition(".")[0] if planned.module.base.flat else path


def parameter_path(planned: PlannedModule) -> str:
    """Return the path of the base parameter that a delta adds to."""
    return planned.path if planned.module.is_expert else planned.path + ".weight"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nest of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
