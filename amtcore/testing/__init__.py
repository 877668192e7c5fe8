"""Conformance tests for models and operations of other distributions, as classes of pytest tests.

The classes are `models.ModelConformance` and `operations.OperationConformance`.
"""
