"""Formats of other libraries with the same rows, written and read by these libraries.

Each class writes rows, reads them in order, reads them with the library's own shuffle, and resumes
after half an epoch. A row maps stream names to arrays. Libraries that are not installed are skipped
and named.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

Arrays = Mapping[str, np.ndarray]
# (columns, dtype) of each stream.
Kinds = Mapping[str, tuple[int, str]]
SEED = 7


class Store(ABC):
    """Rows on disk.

    Args:
        folder: Folder of the files.
        kinds: Columns and dtype of each stream.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path, kinds: Kinds, n_rows: int) -> None:
        self.folder, self.kinds, self.n_rows = folder, kinds, n_rows

    @abstractmethod
    def write(self, rows: Iterable[Arrays]) -> None:
        """Store the rows."""

    @abstractmethod
    def in_order(self) -> Iterator[Arrays]:
        """Open the store and yield all rows."""

    @abstractmethod
    def shuffled(self) -> Iterator[Arrays]:
        """Open the store and yield all rows in a shuffled order."""

    @abstractmethod
    def from_half(self) -> Iterator[Arrays]:
        """Open the store and yield the second half of the shuffled order."""

    def array(self, name: str, content: bytes) -> np.ndarray:
        """Return frames from their bytes as a new array, as every store here does."""
        width, dtype = self.kinds[name]
        return np.frombuffer(content, dtype).reshape(-1, width).copy()


class MemoryMap(Store):
    """One file a stream with all rows end to end, and their offsets."""

    name = "numpy memory map"

    def write(self, rows: Iterable[Arrays]) -> None:
        self.folder.mkdir()
        files = {name: (self.folder / f"{name}.bin").open("wb") for name in self.kinds}
        ends: dict[str, list[int]] = {name: [0] for name in self.kinds}
        for row in rows:
            for name, values in row.items():
                files[name].write(values.tobytes())
                ends[name].append(ends[name][-1] + len(values))
        for file in files.values():
            file.close()
        (self.folder / "ends.json").write_text(json.dumps(ends))

    def _read(self, order: Sequence[int]) -> Iterator[Arrays]:
        ends = json.loads((self.folder / "ends.json").read_text())
        maps = {
            name: np.memmap(self.folder / f"{name}.bin", dtype, "r").reshape(-1, width)
            for name, (width, dtype) in self.kinds.items()
        }
        for row in order:
            yield {
                name: np.array(values[ends[name][row] : ends[name][row + 1]])
                for name, values in maps.items()
            }

    def _order(self) -> np.ndarray:
        return np.random.default_rng(SEED).permutation(self.n_rows)

    def in_order(self) -> Iterator[Arrays]:
        return self._read(range(self.n_rows))

    def shuffled(self) -> Iterator[Arrays]:
        return self._read(self._order())

    def from_half(self) -> Iterator[Arrays]:
        return self._read(self._order()[self.n_rows // 2 :])


class ArrowDatasets(Store):
    """Hugging Face datasets: an Arrow file, a binary column a stream (list columns are slower)."""

    name = "datasets (Arrow)"

    def write(self, rows: Iterable[Arrays]) -> None:
        from datasets import Dataset, Features, Value

        held = [*rows]
        cells = {name: [row[name].tobytes() for row in held] for name in self.kinds}
        features = Features({name: Value("binary") for name in self.kinds})
        made = Dataset.from_dict(cells, features=features)
        made.save_to_disk(self.folder)

    def _open(self) -> Any:
        from datasets import load_from_disk

        return load_from_disk(self.folder)

    def _rows(self, found: Iterable[Any]) -> Iterator[Arrays]:
        for row in found:
            yield {name: self.array(name, row[name]) for name in self.kinds}

    def in_order(self) -> Iterator[Arrays]:
        return self._rows(self._open())

    def shuffled(self) -> Iterator[Arrays]:
        return self._rows(self._open().shuffle(seed=SEED, keep_in_memory=True))

    def from_half(self) -> Iterator[Arrays]:
        whole = self._open().shuffle(seed=SEED, keep_in_memory=True)
        return self._rows(whole.select(range(self.n_rows // 2, self.n_rows)))


class WebDataset(Store):
    """Tars of 64 rows, an npy member a stream; shuffled in a buffer, as its docs advise."""

    name = "webdataset"
    rows_per_tar = 64
    buffer = 200

    def write(self, rows: Iterable[Arrays]) -> None:
        import webdataset

        self.folder.mkdir()
        pattern = str(self.folder / "%05d.tar")
        with webdataset.ShardWriter(pattern, maxcount=self.rows_per_tar, verbose=0) as sink:
            for number, row in enumerate(rows):
                members = {f"{name}.npy": values for name, values in row.items()}
                sink.write({"__key__": f"{number:05d}", **members})

    def _read(self, shuffled: bool) -> Iterator[Arrays]:
        import webdataset

        tars = sorted(str(path) for path in self.folder.glob("*.tar"))
        found = webdataset.WebDataset(
            tars, shardshuffle=len(tars) if shuffled else False, seed=SEED, empty_check=False
        )
        found = found.shuffle(self.buffer, initial=self.buffer) if shuffled else found
        for row in found.decode():
            yield {name: row[f"{name}.npy"] for name in self.kinds}

    def in_order(self) -> Iterator[Arrays]:
        return self._read(False)

    def shuffled(self) -> Iterator[Arrays]:
        return self._read(True)

    def from_half(self) -> Iterator[Arrays]:
        """Read the first half again and skip it, because the library keeps no position."""
        return islice(self._read(True), self.n_rows // 2, None)


class Mds(Store):
    """mosaicml-streaming: MDS shards of 64 MB, not compressed, a bytes column a stream."""

    name = "mosaicml-streaming (MDS)"

    def write(self, rows: Iterable[Arrays]) -> None:
        from streaming import MDSWriter

        columns = dict.fromkeys(self.kinds, "bytes")
        with MDSWriter(out=str(self.folder), columns=columns, hashes=[]) as sink:
            for row in rows:
                sink.write({name: values.tobytes() for name, values in row.items()})

    def _open(self, shuffled: bool) -> Any:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        return StreamingDataset(
            local=str(self.folder), shuffle=shuffled, shuffle_seed=SEED, batch_size=1
        )

    def _rows(self, found: Iterable[Any]) -> Iterator[Arrays]:
        for row in found:
            yield {name: self.array(name, row[name]) for name in self.kinds}

    def in_order(self) -> Iterator[Arrays]:
        return self._rows(self._open(False))

    def shuffled(self) -> Iterator[Arrays]:
        return self._rows(self._open(True))

    def from_half(self) -> Iterator[Arrays]:
        found = self._open(True)
        # Before the first iteration the state of a dataset names epoch -1.
        state = found.state_dict(self.n_rows // 2, from_beginning=True) | {"epoch": 0}
        found.load_state_dict(state)
        return self._rows(found)


RIVALS: tuple[type[Store], ...] = (MemoryMap, ArrowDatasets, WebDataset, Mds)
