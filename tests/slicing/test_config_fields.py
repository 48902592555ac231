"""Fields of a base's config.json that transformers would end in an AttributeError of its own."""

from __future__ import annotations

from typing import Any

import pytest

from moelora.slicing.errors import InputError
from moelora.slicing.meta_model import build_config


@pytest.mark.parametrize("stated", [[], "fp8", 8, True])
def test_a_quantization_config_that_is_no_object(stated: Any) -> None:
    fields = {"model_type": "mixtral", "quantization_config": stated}
    with pytest.raises(InputError, match=f"quantization_config is {type(stated).__name__}"):
        build_config(fields, "config.json")


def test_null_is_none() -> None:
    build_config({"model_type": "mixtral", "quantization_config": None}, "config.json")
