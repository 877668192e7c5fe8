"""What disturbed runs work on: a corpus in every kind of source, a store, and undisturbed results.

The store (moto) and the web server run in this process and are never disturbed themselves; jobs
reach them through `faulty_server`, which is a process of its own for every run, at the same port,
so that addresses in the results are the same. One file of the corpus is no audio: it is in
quarantine whatever happens, and nothing else may be.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests import waiting
from tests.chaos.faulty_server import Rule, fired
from tests.chaos.jobs import ROOT, driver, write_corpus
from tests.chaos.schedule import SOURCES
from tests.pipeline.web_server import web_server
from tests.s3_stand_in import s3_stand_in

CLIPS, SECONDS = 23, 0.5
BAD = b"this is no audio"
SHARD_SECONDS = 1.2
BUCKET = "out"
STARTED_WITHIN_S = waiting.DEADLINE_S


class Front:
    """A `faulty_server` at one port, for one run after the other.

    Args:
        behind: Port of the server that it stands before.
    """

    def __init__(self, behind: int) -> None:
        self._behind = behind
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def begin(self, folder: Path, rules: Sequence[Rule]) -> None:
        """Serve another run; what its rules meet is noted in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._rules, self._log = folder / f"rules-{self.port}.json", folder / f"met-{self.port}"
        self._rules.write_text(json.dumps([asdict(rule) for rule in rules]))
        self._log.unlink(missing_ok=True)
        self.kill()
        self.start()

    def start(self) -> None:
        """Be there; it counts on where it was."""
        if self._process is not None:
            return
        command = [sys.executable, "-S", "-m", "tests.chaos.faulty_server"]
        arguments = [str(self.port), str(self._behind), str(self._rules), str(self._log)]
        self._process = subprocess.Popen([*command, *arguments], cwd=ROOT)
        until = time.monotonic() + STARTED_WITHIN_S
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.01)
        raise TimeoutError("the server does not start")

    def kill(self) -> None:
        """Be gone at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def send(self, number: signal.Signals) -> None:
        """A signal, where it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def fired(self) -> int:
        """Rules that have disturbed something in this run."""
        return len(fired(self._log))


class World:
    """See the module.

    Args:
        folder: Everything lies below it. store: Port of the store. web: Of the web server.
        given: A corpus of files and its undisturbed result, where there are some already; there is
            no other source then.
    """

    def __init__(
        self,
        folder: Path,
        store: int,
        web: int,
        options: dict[str, Any],
        given: tuple[Path, Path] | None = None,
    ) -> None:
        self.folder, self.options = folder, options
        self.fronts = {"s3": Front(store), "web": Front(web)}
        self._references: dict[str, Path] = {}
        self.files = folder / "web" / "corpus"  # the corpus as files
        if given is not None:
            self.files, self._references["files"] = given

    def job(self, path: Path, source: str, output: str, **run: Any) -> Path:
        """A job file.

        Args:
            source: Of SOURCES. output: A folder, or a name in the store.
            run: The job's own section.
        """
        job = {
            "name": "job",
            "source": self._section(source),
            "extract": [{"model": "dau1997", "fs_hz": 16000}],
            "output": {"uri": output, "shard_seconds": SHARD_SECONDS},
            "run": {"threads_per_worker": 1, **run},
        }
        if output.startswith("s3://"):
            job["output"]["storage_options"] = self._through_front()
        path.write_text(yaml.safe_dump(job))
        return path

    def reference(self, source: str) -> Path:
        """The undisturbed output of a source; made once."""
        if source not in self._references:
            folder = self.folder / f"reference-{source}"
            folder.mkdir()
            for front in self.fronts.values():
                front.begin(folder, ())
            job = self.job(folder / "job.yaml", source, str(folder / "out"), executor="local")
            with driver(str(job), ray_address=None) as running:
                code, last = running.finish()
                assert code == 0, f"an undisturbed run ended with {code}: {running.errors()}"
            assert (last["rows_ok"], last["rows_bad"]) == (CLIPS, 1), last
            self._references[source] = folder / "out"
        return self._references[source]

    def write_corpus(self) -> None:
        """The same clips as files, as objects, in tars and in a Parquet file."""
        write_corpus(self.files, CLIPS, SECONDS)
        (self.files / "zz.wav").write_bytes(BAD)
        names = sorted(path.name for path in self.files.iterdir())
        manifest = ["id,uri", *(f"{name},{self.fronts['web'].url}/corpus/{name}" for name in names)]
        (self.folder / "web.csv").write_text("\n".join(manifest))
        self._fs.mkdir("corpus")
        for name in names:
            self._fs.put_file(str(self.files / name), f"corpus/files/{name}")
        for part, some in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
            self._put_tar(part, some)
        cells = [{"bytes": (self.files / name).read_bytes(), "path": name} for name in names]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({"audio": pa.array(cells, kind), "id": names})
        pq.write_table(table, self.folder / "train.parquet", row_group_size=3)
        self._fs.put_file(str(self.folder / "train.parquet"), "corpus/table/train.parquet")

    def open_store(self) -> None:
        """Make the bucket for outputs."""
        self._fs.mkdir(BUCKET)

    def clear_store(self) -> None:
        """All stores of one process share their buckets."""
        for bucket in (BUCKET, "corpus"):
            with suppress(FileNotFoundError):
                self._fs.rm(bucket, recursive=True)

    def _put_tar(self, part: int, names: Sequence[str]) -> None:
        path = self.folder / f"{part}.tar"
        with tarfile.open(path, "w") as tar:
            for name in names:
                tar.add(self.files / name, name)
        self._fs.put_file(str(path), f"corpus/tars/{part}.tar")

    @cached_property
    def _fs(self) -> Any:
        return fsspec.filesystem("s3", **self.options)

    def _section(self, source: str) -> dict[str, Any]:
        if source == "files":
            return {"kind": "files", "uri": str(self.files)}
        if source == "web":
            manifest, allow = str(self.folder / "web.csv"), [f"{self.fronts['web'].url}/"]
            return {"kind": "manifest", "uri": manifest, "allow": allow}
        options = {"storage_options": self._through_front()}
        if source == "tars":
            return {"kind": "webdataset", "uri": "s3://corpus/tars", **options}
        if source == "parquet":
            uri, columns = "s3://corpus/table/train.parquet", {"id_column": "id"}
            return {"kind": "hf", "uri": uri, "streaming": True, **columns, **options}
        assert source == "s3" and source in SOURCES
        return {"kind": "files", "uri": "s3://corpus/files", **options}

    def _through_front(self) -> dict[str, Any]:
        patience = {"connect_timeout": 2, "read_timeout": 3, "retries": {"max_attempts": 1}}
        return {
            **self.options,
            "endpoint_url": self.fronts["s3"].url,
            "config_kwargs": patience,
        }


@contextmanager
def world(folder: Path, given: tuple[Path, Path] | None = None) -> Iterator[World]:
    """A world below `folder`, whose servers are gone when the block ends; see `World`."""
    with ExitStack() as stack:
        address = stack.enter_context(s3_stand_in())
        (folder / "web").mkdir(parents=True, exist_ok=True)
        web = stack.enter_context(web_server(folder / "web"))
        options = {
            "key": "user-key",
            "secret": "user-secret",
            "endpoint_url": address,
            "skip_instance_cache": True,
        }
        made = World(folder, _port(address), _port(web), options, given)
        for front in made.fronts.values():
            stack.callback(front.kill)
        stack.callback(made.clear_store)
        made.open_store()
        if given is None:
            made.write_corpus()
        yield made


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def marked(mark: str) -> list[int]:
    """Processes that were started, however far down, with this mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
    return found
