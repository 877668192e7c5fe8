"""A dataset of many Parquet files behind a server that counts, and what was read of its audio."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.sources.hf_parquet import chunk_range
from tests.pipeline.audio_factory import clip
from tests.pipeline.counting_store import Store

FILES, GROUP_ROWS = 200, 2
AUDIO_S = 1.2
HEADER = clip("wav", AUDIO_S)[:44]
WAV_BYTES = len(clip("wav", AUDIO_S))


def wav(number: int) -> bytes:
    """A clip that does not compress; 53 kB."""
    return HEADER + np.random.default_rng(number).bytes(WAV_BYTES - len(HEADER))


def parquet(numbers: range, **options: Any) -> bytes:
    """A file of clips in row groups."""
    audio = [{"bytes": wav(n), "path": f"{n}.wav"} for n in numbers]
    sink = pa.BufferOutputStream()
    columns = {"audio": audio, "text": [f"sentence {n}" for n in numbers]}
    options = {"row_group_size": GROUP_ROWS, "compression": "none", **options}
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue().to_pybytes()


def fill(store: Store) -> int:
    """Put the files there: one row group each, in every twentieth two; how many rows."""
    n_rows = 0
    for n in range(FILES):
        rows = range(n_rows, n_rows + GROUP_ROWS * (2 if n % 20 == 0 else 1))
        n_rows = rows.stop
        store.put(f"train-{n:05d}.parquet", parquet(rows))
    return n_rows


def times_given(store: Store) -> np.ndarray:
    """How often the server gave each byte of the audio column, of all files."""
    found = []
    for name, counts in store.given.items():
        footer = pq.ParquetFile(pa.BufferReader(store.files[name])).metadata
        for group in range(footer.num_row_groups):
            for leaf in range(2):  # bytes and paths
                lies = chunk_range(footer.row_group(group).column(leaf))
                found.append(counts[lies.start : lies.end])
    return np.concatenate(found)
