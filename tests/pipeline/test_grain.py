"""grain reads a feature set in a process that lacks torch, as a JAX user has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.pipeline.reader_data import write_set
from tests.without_packages import without

SCRIPT = """
import json, sys
import grain
import earmill

if __name__ == "__main__":
    features = earmill.open_features(sys.argv[1])
    rows = grain.MapDataset.source(features).seed(1).shuffle()
    batches = rows.batch(4, batch_fn=lambda rows: [[row.index, row.row_id] for row in rows])
    reader = iter(batches.to_iter_dataset())
    seen = [next(reader), next(reader)]
    state = reader.get_state()
    rest = [*reader]
    again = iter(batches.to_iter_dataset())
    again.set_state(state)
    shapes = [[*row.features["modulation"].shape] for row in rows.to_iter_dataset()]
    print(json.dumps({"seen": seen, "rest": rest, "again": [*again], "shapes": shapes}))
    workers = grain.MultiprocessingOptions(num_workers=2)
    ids = rows.map(lambda row: row.index).to_iter_dataset().mp_prefetch(workers)
    print(json.dumps(sorted(ids)))
"""


def test_grain_reads_shuffles_and_resumes_without_torch(tmp_path: Path) -> None:
    write_set(tmp_path / "set", n_rows=10, rows_per_shard=4, finalised=True)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "set")],
        env=without(tmp_path / "lacks", "torch", "numba", "jax"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, ids = map(json.loads, done.stdout.splitlines()[-2:])
    read = [index for batch in first["seen"] + first["rest"] for index, _ in batch]
    assert sorted(read) == [*range(10)] != read
    assert first["again"] == first["rest"] and len(first["shapes"]) == 10
    assert ids == [*range(10)]
