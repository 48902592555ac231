"""Wrong arguments on a GPU: the tests of test_arguments.py, where plans are kept between calls."""

import pytest
from test_arguments import (  # noqa: F401
    path,
    test_autograd_sees_what_was_written,
    test_elements_in_one_place_are_refused,
    test_no_gradient_is_lost,
    test_routing_of_another_call_is_refused,
    test_sizes_of_a_routing_are_checked,
    test_wrong_argument_is_named,
    test_wrong_workspace_is_refused,
)

pytestmark = pytest.mark.gpu
