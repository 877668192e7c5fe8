"""Conformance tests for models and operations of other distributions, as classes of pytest tests.

    from amtcore.testing.models import ModelConformance
    from amtcore.testing.operations import OperationConformance

It may import everything of amtcore, and pytest.
"""
