"""What a user may choose of a set: format, streams, dtype; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earmill.pipeline.reader.catalog import Catalog, load_catalog
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import write_set


@pytest.fixture(scope="module")
def catalog(finalised: Path) -> Catalog:
    return load_catalog(Layout.open(str(finalised)))


def test_format(catalog: Catalog, tmp_path: Path) -> None:
    assert [catalog.choose_format(f) for f in (None, "zarr", "parquet")] == [
        "zarr",
        "zarr",
        "parquet",
    ]
    with pytest.raises(ValueError, match=r"stored as \['parquet', 'zarr'\], got format='csv'"):
        catalog.choose_format("csv")
    write_set(tmp_path, n_rows=2, formats=("parquet",))
    alone = load_catalog(Layout.open(str(tmp_path)))
    assert alone.choose_format(None) == "parquet"
    with pytest.raises(ValueError, match="leave it out to choose"):
        alone.choose_format("zarr")


def test_streams(catalog: Catalog) -> None:
    assert catalog.choose_streams(None) == ("modulation", "loudness")
    assert catalog.choose_streams(["loudness", "loudness"]) == ("loudness",)
    assert catalog.choose_streams(("loudness", "modulation")) == ("loudness", "modulation")
    for wrong in ([], ["pitch"], ["loudness", "pitch"]):
        with pytest.raises(ValueError, match=r"expected streams out of \['modulation'"):
            catalog.choose_streams(wrong)
    with pytest.raises(TypeError, match="got the string 'loudness'"):
        catalog.choose_streams("loudness")


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (None, "float32"),
        ("stored", "float16"),
        ("float32", "float32"),
        (np.float64, "float64"),
        ("f2", "float16"),
        (torch.float64, "float64"),
    ],
)
def test_dtype(catalog: Catalog, wanted: Any, name: str) -> None:
    assert catalog.choose_dtypes(wanted, ["loudness"]) == {"loudness": np.dtype(name)}


@pytest.mark.parametrize("wanted", ["int16", "complex64", bool, "bfloat16", torch.bfloat16, 7])
def test_no_other_dtype(catalog: Catalog, wanted: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype is one of .*'stored'\], got"):
        catalog.choose_dtypes(wanted, ["loudness"])
