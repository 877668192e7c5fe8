"""Arguments of a model's stages: defaults, what the caller gave, and what is the model's to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amtcore.arguments import plain_number
from amtcore.errors import ParameterError


def stage_arguments(
    name: str,
    given: Mapping[str, Any] | None,
    models: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All arguments of a stage.

    Args:
        name: Of the model's argument that holds `given`, for the error.
        given: What the caller set for the stage; None is nothing.
        models: What is the model's to say, such as learnable and dtype; the caller may repeat it
            but not contradict it.
        defaults: What the model sets for the stage and the caller may change.
    """
    given = given or {}
    for key in models.keys() & given.keys():
        number = plain_number(given[key])
        value = given[key] if number is None else number
        if value != models[key]:
            raise ParameterError(
                f"{name}: {key} is the model's, {models[key]!r}, and cannot be {given[key]!r} for "
                f"one stage; set {key} where the model is built, or leave it out"
            )
    return {**(defaults or {}), **given, **models}
