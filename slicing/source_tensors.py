"""The source's own tensors, each filled from the factors that hold its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from moelora.slicing.header import DTYPE_SIZES
from moelora.slicing.lora import slices, torch_dtypes
from moelora.slicing.manifest_checks import WRONG_KIND
from moelora.slicing.read import ShardSet
from moelora.slicing.restore_rows import Row, no_way_back
from moelora.slicing.tensor_writer import Shape

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


def source_shapes(dtypes: dict[str, str], rows: list[Row]) -> dict[str, tuple[str, Shape]]:
    """Return dtype and shape of each of the source's tensors by key.

    dtypes: what the rank files hold, by tensor.
    """
    shapes: dict[str, tuple[str, Shape]] = {}
    for row in rows:
        have = dtypes.get(row.tensor, row.dtype)  # where it has none, nothing will be written
        shapes.setdefault(row.key, (_source_dtype(have, row), row.shape))
    return shapes


class SourceTensors:
    """Takes factors one by one and gives each tensor back when all of its factors were seen.

    Raises:
        InputError: the rows do not fit each other.
    """

    def __init__(self, shards: ShardSet, rows: list[Row]) -> None:
        self._shards = shards
        self._of_factor: dict[str, list[Row]] = {}
        first: dict[str, Row] = {}
        for row in rows:
            self._of_factor.setdefault(row.tensor, []).append(row)
            other = first.setdefault(row.key, row)
            if (row.dtype, row.shape) != (other.dtype, other.shape):
                raise no_way_back(shards, ValueError(f"{row.key!r} has two dtypes or shapes"))
        self._missing = Counter(row.key for row in rows)
        self._found: Tensors = {}
        self._names = {dtype: name for name, dtype in torch_dtypes().items()}

    def add(self, name: str, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a factor; yield the tensors that are whole now.

        Raises:
            InputError: the rows do not fit the factor.
        """
        import torch

        found = self._found
        for row in self._of_factor.pop(name, ()):
            try:
                dtype = torch_dtypes()[_source_dtype(self._names[full.dtype], row)]
                if row.key not in found:
                    found[row.key] = torch.zeros(row.shape, dtype=dtype)
                _fill(found[row.key], row, full)
            except (*WRONG_KIND, RuntimeError) as error:  # torch: shapes that do not fit
                raise no_way_back(self._shards, error) from error
            self._missing[row.key] -= 1
            if not self._missing[row.key]:
                yield row.key, found.pop(row.key)

    def finish(self) -> None:
        """Raise InputError when rows name a factor that never came."""
        if self._of_factor:
            raise no_way_back(self._shards, KeyError(*sorted(self._of_factor)[:1]))


def source_tensors(
    shards: ShardSet, factors: Iterable[tuple[str, torch.Tensor]], rows: list[Row]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the source's tensors by their own keys, each when all of its factors have been seen.

    Raises:
        InputError: the rows do not fit the factors.
    """
    source = SourceTensors(shards, rows)
    for name, full in factors:
        yield from source.add(name, full)
    source.finish()


def _source_dtype(have: str, row: Row) -> str:
    """Return a source tensor's dtype. A cast is kept: there is no way back to the source's bits."""
    return have if DTYPE_SIZES[have] < DTYPE_SIZES[row.dtype] else row.dtype


def _fill(tensor: torch.Tensor, row: Row, full: torch.Tensor) -> None:
    part = full[slices(row.at)]
    seen = tensor.view(row.view).permute(row.permute)
    if row.src is None and seen.shape[0] == 1:
        part = part[:1]  # written out for every expert
    (seen if row.src is None else seen[slices(row.src)]).copy_(part)
