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

from moelora.slicing.base_model import BaseModule
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
    """Return a plain module's base weight plus the file's delta, in fp32."""
    delta = plain_delta(witness, planned.path, weight.device)
    if delta is None:
        return weight.float()
    if planned.module.base.kind == "embedding":
        delta = delta.T
    return (weight.double() + delta).float()


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

    @contextmanager
    def installed(self) -> Iterator[Unsharded]:
        """Run the model with the file's deltas for the time of the block."""
        handles, modules = [], {path: self.model.get_submodule(path) for path in self.owners}
        experts = [module for path, module in modules.items() if self._experts(path)]
        try:
            for path, module in modules.items():
                handles.append(
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True)
                )
                # before the hook that takes a streamed weight off the device again
                handles.append(module.register_forward_hook(self._after(path), prepend=True))
            with looping(experts):
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
            experts = self._experts(path)
            for name, parameter in own.items():
                planned = adapted.get(name)
                if experts is not None and parameter.dim() == (2 if experts.flat else 3):
                    parent, _, leaf = name.rpartition(".")
                    holder = module.get_submodule(parent)
                    vars(holder)[leaf] = self._merged(parameter.data, experts, planned)
                    saved.stand_ins.append((holder, leaf))
                    continue
                data = parameter.data
                if planned is not None and self.witness is not None:
                    data = merged_weight(data, planned, self.witness)
                data = data.to(self.compute)
                saved.replaced[name] = (parameter.data, data)
                parameter.data = data
            return _cast(args, self.compute), _cast(kwargs, self.compute)

        return hook

    def _experts(self, path: str) -> BaseModule | None:
        """Return a parameter of the experts that are called by this path; None where it is plain."""
        module = self.owners[path][0].module
        return module.base if module.is_expert else None

    def _merged(
        self, weight: torch.Tensor, experts: BaseModule, planned: PlannedModule | None
    ) -> MergedExperts:
        stacks = None
        if planned is not None and self.witness is not None:
            stacks = stacks_of(self.witness, planned.module.base)
        if experts.flat:
            weight = weight.view(experts.num_experts, -1, weight.shape[-1])
        return MergedExperts(weight, stacks, self.compute)

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            dtype = self.saved[path].dtype
            self._restore(path)
            return _cast(output, dtype)

        return hook

    def _restore(self, path: str) -> None:
        saved = self.saved.pop(path)
        for holder, leaf in saved.stand_ins:
            del vars(holder)[leaf]
        parameters = dict(self.model.get_submodule(path).named_parameters())
        for name, (own, put) in saved.replaced.items():
            # where a streamed weight has left the device again, its placeholder stays
            if parameters[name].data_ptr() == put.data_ptr():
                parameters[name].data = own


@dataclass
class _Saved:
    """The type of a module, where stand-ins are, and per other parameter its own data and what was
    put in its place."""

    dtype: torch.dtype
    stand_ins: list[tuple[nn.Module, str]] = field(default_factory=list)
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
