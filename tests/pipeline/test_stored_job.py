"""The job that a dataset tells: run again as it is, but never code that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.operations.retry import stored_job
from earmill.pipeline.storage.layout import Layout

from .outputs import dataset_file

TOUCH = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()"


def _dataset(folder: Path, entry: dict[str, Any]) -> Layout:
    layout = Layout.open(str(folder))
    spec = {
        "source": {"kind": "files", "uri": "corpus"},
        "extract": [entry],
        "output": {"formats": ["zarr"], "dtype": "float32"},
    }
    open_dataset(layout, dataset_file(spec=spec))
    return layout


def test_a_stored_job_has_this_place_as_output(tmp_path: Path) -> None:
    layout = _dataset(tmp_path, {"model": "dau1997"})
    spec = stored_job(layout, str(tmp_path), {})
    assert (spec.output.uri, spec.extract[0].model) == (str(tmp_path), "dau1997")


def test_code_is_taken_from_the_authors_own_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_net.py").write_text(TOUCH)
    monkeypatch.syspath_prepend(tmp_path)
    entry = {
        "model": "torch_module",
        "params": {"module": "hostile_net:Net"},
        "streams": {"x": {"width": 1, "hop_length": 160}},
    }
    layout = _dataset(tmp_path / "out", entry)
    with pytest.raises(SpecError, match="names code to import for model 'torch_module'"):
        stored_job(layout, str(tmp_path / "out"), {})
    assert not (tmp_path / "ran").exists()
    job = {
        "source": {"kind": "files", "uri": "corpus"},
        "extract": [entry],
        "output": {"uri": "elsewhere"},
    }
    own = stored_job(layout, str(tmp_path / "out"), {}, job=job)
    assert own.extract[0].params == {"module": "hostile_net:Net"}
