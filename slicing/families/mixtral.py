"""Mixtral."""

from __future__ import annotations

from moelora.slicing.families.common import GQA, ROUTER, VOCABULARY
from moelora.slicing.rules import Family

# transformers 5 says mlp where the Hub's checkpoints and older adapters say block_sparse_moe.
MIXTRAL = Family(
    ("mixtral",),
    (*GQA, *ROUTER, *VOCABULARY),
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
)

FAMILIES = (MIXTRAL,)
