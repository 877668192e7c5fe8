"""The formats that come with earmill hold to what is asked of strangers."""

from __future__ import annotations

from earmill.testing import FormatConformance


class TestZarr(FormatConformance):
    format = "zarr"


class TestParquet(FormatConformance):
    format = "parquet"


class TestWebDataset(FormatConformance):
    format = "webdataset"
