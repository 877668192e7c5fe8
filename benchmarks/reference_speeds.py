"""The built-in reference of `earmill plan`: core seconds of a second of audio, model by model.

Every model of this package with its default parameters, rate and streams, timed as
`earmill plan --measure` times a job's; and what the sections of RESULTS.md on GPUs say of them.
Written into the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import earmill.pipeline.planning.speeds as speeds
from amtcore.features.build import build_extractor, list_models
from benchmarks.cost import gpu_rates
from benchmarks.report import RESULTS
from earmill.pipeline.common.machine import processor_name
from earmill.pipeline.planning.timing import seconds_of_a_second, warm_up

RUNS = 3
# What the section of the GPUs calls the models with their default parameters, and their rate there.
ON_GPUS = {
    "Dau1997": ("dau1997", 44100.0),
    "Osses2021": ("osses2021", 44100.0),
    "King2019, Hilbert envelope": ("king2019", 44100.0),
    "Paulick2024": ("paulick2024", 44100.0),
    "Moore2016, two ears": ("moore2016", 32000.0),
    "Glasberg2002": ("glasberg2002", 32000.0),
}


def gpus_of(text: str) -> dict[str, dict[str, dict[str, float]]]:
    """GPU -> model -> its rate and seconds of audio a second, as RESULTS.md has them."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (model, gpu), rate in gpu_rates(text).items():
        if model in ON_GPUS:
            name, fs_hz = ON_GPUS[model]
            found.setdefault(gpu, {})[name] = {"fs_hz": fs_hz, "times_real_time": rate}
    return found


def main() -> None:
    """Measure and write the file; print it."""
    models = {}
    for info in list_models():
        if info.distribution is not None and not info.distribution.startswith("earmill "):
            continue
        if any("default" not in each.to_dict() for each in info.params.values()):
            continue  # what it costs is what the job names
        extractor = build_extractor(info.name)
        warm_up([extractor])
        core_s = min(seconds_of_a_second([extractor])[1] for _ in range(RUNS))
        models[info.name] = {"fs_hz": extractor.fs_hz, "core_s": float(f"{core_s:.3g}")}
    gpus = gpus_of(RESULTS.read_text())
    text = json.dumps({"processor": processor_name(), "models": models, "gpus": gpus}, indent=1)
    text += "\n"
    Path(speeds.__file__).with_name(speeds.REFERENCE_FILE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
