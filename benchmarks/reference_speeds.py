"""The built-in speeds of `earmill plan`: core seconds per second of audio, by model.

Every model with its default parameters, rate and streams is timed as by `earmill plan --measure`.
The file is written into the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import earmill.pipeline.planning.speeds as speeds
from amtcore.features.registry import build_extractor, list_models
from earmill.pipeline.common.machine import processor_name
from earmill.pipeline.planning.speeds import seconds_of_a_second, warm_up

RUNS = 3


def main() -> None:
    """Measure and write the file; print it."""
    models = {}
    for info in list_models():
        if info.distribution is not None and not info.distribution.startswith("earmill "):
            continue
        if any("default" not in each.to_dict() for each in info.params.values()):
            continue  # its speed depends on the class that a job names
        extractor = build_extractor(info.name)
        warm_up([extractor])
        core_s = min(seconds_of_a_second([extractor])[1] for _ in range(RUNS))
        models[info.name] = {"fs_hz": extractor.fs_hz, "core_s": float(f"{core_s:.3g}")}
    text = json.dumps({"processor": processor_name(), "models": models}, indent=1)
    text += "\n"
    Path(speeds.__file__).with_name(speeds.REFERENCE_FILE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
