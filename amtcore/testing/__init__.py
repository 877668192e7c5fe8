"""Conformance tests for models and operations of other distributions, as classes of pytest tests.

The classes are `models.ModelConformance` and `operations.OperationConformance`.
"""

import pytest

# A failed assertion of the suites shows its values.
pytest.register_assert_rewrite("amtcore.testing.models", "amtcore.testing.operations")
