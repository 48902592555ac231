"""The fused forms on a GPU: the tests of test_fused_forms.py, compiled."""

import pytest
from test_fused_forms import (  # noqa: F401
    test_activation,
    test_combine,
    test_combine_beyond_32_bits,
    test_combine_of_strided_tensors,
)

pytestmark = pytest.mark.gpu
