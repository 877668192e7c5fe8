"""The list of models, kept as JSON: making it imports torch and numba, which takes seconds.

What is kept comes from the models themselves and holds for these sources and these versions.
"""

from __future__ import annotations

import json
from typing import Any

from earmill.pipeline.common.user_cache import keep, models_key, read_kept

_KIND = "models"


def listed_models() -> list[dict[str, Any]]:
    """Every model as `ModelInfo.to_dict` says it."""
    key = models_key()
    if key is not None:
        kept = read_kept(_KIND, key)
        if isinstance(kept, list):
            return kept
    made = _made()
    if key is not None and not any(model["error"] for model in made):
        keep(_KIND, key, made)
    return made


def _made() -> list[dict[str, Any]]:
    from amtcore.features.build import list_models

    # As they are read back: tuples become lists.
    text = json.dumps([model.to_dict() for model in list_models()], default=str)
    listed: list[dict[str, Any]] = json.loads(text)
    return listed
