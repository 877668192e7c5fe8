"""A dataset, and a hub to push it to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.hub.stand_in import TOKEN, HubStandIn, hub
from tests.pipeline.outputs import (
    PLAN,
    dataset_file,
    make_bad,
    make_row,
    publish,
    write_plan,
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    from huggingface_hub import constants

    sleep = time.sleep
    with hub() as (server, address):
        # Read from the environment when huggingface_hub was imported.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.01)))
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards with bad rows, of few files: a Zarr store is in the first test's."""
    layout = Layout.open(tmp_path_factory.mktemp("made") / "features")
    write_plan(layout, PLAN)
    open_dataset(layout, dataset_file())
    for number, (shard, planned) in enumerate(PLAN.items()):
        good = [make_row(name) for name in planned if not name.startswith(("bad", "mute"))]
        bad = [make_bad(name) for name in planned if name.startswith(("bad", "mute"))]
        publish(layout, shard, f"{number:08x}", good, bad, formats=("parquet",))
    finalise(layout)
    return Path(layout.root)


@pytest.fixture
def layout(made: Path, tmp_path: Path) -> Layout:
    return Layout.open(shutil.copytree(made, tmp_path / "features"))
