"""`dataset.json`, the description of an output, and its revisions. A job that would write something
else into the same place is refused before any work. Run settings and credentials are left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from earmill.pipeline.common.errors import OutputError, OvertakenError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.formats.format import NESTED, format_name
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.spec.licenses import stored_licenses
from earmill.pipeline.spec.messages import describe_changes
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import Strict, UnreadableVersionError, versioned_json
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.retrying import store_errors

# Parts that only a dataset has: finding one without dataset.json means the place is taken.
_DATASET_FOLDERS = ("data", "rows", "quarantine", "commits", "index")
_NAMED_BELOW = 3
_CARDS = (paths.README_FILE, paths.CROISSANT_FILE, paths.PROVENANCE_FILE)


@dataclass(frozen=True)
class Change(Strict):
    """Changes of a revision to the dataset before it."""

    number: int
    why: str
    base: str  # Path of the snapshot that it was made on.
    plans: tuple[str, ...]  # Ids of earlier plans, whose commits are still part of it.
    dropped: tuple[str, ...]  # Committed shards that are not part of it any more.
    next_shard: int  # The lowest number that no shard ever had.
    carried: OutFile | None  # Table of the rows that are copied, see `dataset.copied_rows`.
    created: str


@dataclass(frozen=True)
class DatasetFile(Strict):
    """The content of dataset.json, and of the revisions that take its place."""

    name: str
    spec: Mapping[str, Any]  # `JobSpec.canonical()`; `spec_sha256` is `JobSpec.sha256()`.
    spec_sha256: str
    plan_id: str
    streams: tuple[Mapping[str, Any], ...]  # `StreamInfo.to_dict()` of every stream.
    buffers_sha256: Mapping[str, str]  # Model name to the hash of its buffers.
    provenance: Mapping[str, Any]  # `run_provenance()`.
    created: str
    # By carried-through column, see `common.arrow_types`.
    extra_types: Mapping[str, Any] = field(default_factory=dict)
    extra_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # This field and the next two are not stored at their default, as before version 3.
    parquet_form: str = NESTED
    # Licences of `source` and `features`, as far as the job states them.
    licenses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    change: Change | None = None
    layout_version: int = paths.LAYOUT_VERSION

    @property
    def path(self) -> str:
        return paths.revision_path(self.change.number) if self.change else paths.DATASET_FILE

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """The key of one revision of one dataset, whatever its layout version."""
        return (self.path, self.created, self.spec_sha256, self.plan_id)

    @property
    def plan_ids(self) -> frozenset[str]:
        """The plans that commits of this dataset may be of."""
        return frozenset((self.plan_id, *(self.change.plans if self.change else ())))

    @property
    def dropped(self) -> frozenset[str]:
        return frozenset(self.change.dropped if self.change else ())

    def to_json(self) -> str:
        added: dict[str, Any] = {"parquet_form": NESTED, "licenses": {}, "change": None}
        fields = {k: v for k, v in asdict(self).items() if k not in added or v != added[k]}
        return json.dumps(fields, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> DatasetFile:
        """Parse the file; OutputError if a field is wrong or the layout version unknown."""
        try:
            found = versioned_json(cls, text)
            # Check what every reader relies on.
            names = [layout_of(stream).name for stream in found.streams]
            names += [entry["model"] for entry in found.spec["extract"]]
            output = found.spec["output"]
            if not all(isinstance(value, str) for value in (*names, output["dtype"])):
                raise TypeError("expected text in streams, spec.extract and spec.output.dtype")
            for fmt in output["formats"]:
                format_name(fmt)
            stored_licenses(found.licenses)
        except UnreadableVersionError as err:
            raise OutputError(
                f"{err}; use the release that wrote this dataset, or another output"
            ) from err
        except (ValueError, KeyError, TypeError) as err:
            raise OutputError(
                f"{paths.DATASET_FILE} is not readable: {type(err).__name__}: {err}; "
                "restore it, or use another output"
            ) from err
        return found


def read_dataset(layout: Layout) -> DatasetFile | None:
    """Return the newest revision, or None for a new output; OutputError if it cannot be read."""
    with store_errors(layout.url()):
        numbers = map(paths.parse_revision_path, layout.list("revisions"))
        newest = max((number for number in numbers if number is not None), default=0)
    return read_description(layout, paths.revision_path(newest) if newest else paths.DATASET_FILE)


def require_dataset(layout: Layout) -> DatasetFile:
    """Return the dataset, or raise an OutputError that names datasets below the place."""
    dataset = read_dataset(layout)
    if dataset is None:
        hint = datasets_below(layout)
        raise OutputError(
            f"{layout.url()} holds no {paths.DATASET_FILE}; give the output.uri of a job{hint}"
        )
    return dataset


def read_description(layout: Layout, rel: str) -> DatasetFile | None:
    with store_errors(layout.url()):
        if (content := layout.read_if_there(rel)) is None:
            return None
    try:
        return DatasetFile.from_json(content)
    except OutputError as err:
        raise OutputError(f"{layout.url(rel)}: {err}") from err


def datasets_below(layout: Layout) -> str:
    """Return a hint with the datasets one folder below a local place."""
    found = sorted(Path(layout.root).glob(f"*/{paths.DATASET_FILE}")) if layout.is_local else []
    names = [one_line(str(path.parent)) for path in found[:_NAMED_BELOW]]
    more = ", ..." if len(found) > _NAMED_BELOW else ""
    return f"; did you mean {' or '.join(names)}{more}?" if names else ""


def raise_version(layout: Layout) -> None:
    """Raise the layout version, so that releases that cannot read the dataset refuse it."""
    seen = layout.read_bytes(paths.DATASET_FILE)
    dataset = DatasetFile.from_json(seen)
    if dataset.layout_version < paths.LAYOUT_VERSION:
        raised = replace(dataset, layout_version=paths.LAYOUT_VERSION)
        layout.replace_own(paths.DATASET_FILE, raised.to_json().encode(), seen)


def check_same(layout: Layout, dataset: DatasetFile) -> None:
    """Raise OvertakenError unless the output still holds the dataset that a command began with."""
    now = read_dataset(layout)
    if now is None or now.identity != dataset.identity:
        raise OvertakenError(
            f"{layout.url()}: another command changed or removed the dataset after this one began; "
            "this run ends here and writes no more: run the same command again, `earmill extract` "
            "with --resume"
        )


def check_dataset(stored: DatasetFile, wanted: DatasetFile) -> None:
    """Refuse, with an OutputError, to continue a dataset with another spec, plan or model state."""
    if stored.spec_sha256 != wanted.spec_sha256:
        changed = describe_changes(stored.spec, wanted.spec) or "not visible in the spec"
        raise OutputError(
            f"this output belongs to spec {stored.spec_sha256[:12]}, the job has "
            f"{wanted.spec_sha256[:12]} (different: {changed}); use another output.uri"
        )
    if stored.plan_id != wanted.plan_id:
        raise OutputError(
            f"this output belongs to plan {stored.plan_id}, the source now gives {wanted.plan_id}: "
            "files were added, removed or changed; resume with the stored plan or use another "
            "output.uri"
        )
    was, now = (
        {s["name"]: s.get("scale_factor", 1.0) for s in d.streams} for d in (stored, wanted)
    )
    if was != now:
        raise OutputError(
            f"this output was begun with the scales {was} of its streams, this release stores them "
            f"with {now}; continue with the release named in dataset.json or use another output.uri"
        )
    if dict(stored.buffers_sha256) != dict(wanted.buffers_sha256):
        raise OutputError(
            "the models' coefficients differ from those this output was begun with, so the "
            "features would be a mix; continue with the release named in dataset.json or use "
            "another output.uri"
        )


def open_dataset(
    layout: Layout, wanted: DatasetFile, may_write: Callable[[Layout], None] = lambda layout: None
) -> DatasetFile:
    """Create dataset.json, or check that the existing one describes the same job. Two drivers that
    start together both get the stored description. `may_write` runs before the file is created, and
    raises if the run was overtaken. OutputError if the output belongs to something else, or is not
    empty and has no dataset.json."""
    stored = read_dataset(layout)
    if stored is None:
        taken = [name for name in _CARDS if layout.exists(name)]
        taken += [name for name in _DATASET_FOLDERS if layout.list(name)]
        if taken:
            raise OutputError(
                f"{layout.url()} has no {paths.DATASET_FILE} but already holds {', '.join(taken)}; "
                "use an empty output.uri"
            )
        may_write(layout)
        if layout.put_if_absent(paths.DATASET_FILE, wanted.to_json().encode()):
            return wanted
        stored = require_dataset(layout)
    check_dataset(stored, wanted)
    return stored
