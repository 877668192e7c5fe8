"""The on-disk layout (version 3) as a grammar, and the functions that spell its names.

Paths are relative to the root of a dataset and use `/`::

    root       = dataset.json drivers plan* revisions* parts* commits* closing?
    drivers    = driver.json? crew/<run-id>.json*        drivers at work; each while it lives
               | claims/<plan-id>/<block>.<n>.json       put-if-absent: the driver of these shards;
                                                         the highest n counts; gone at the end
    parts      = data rows quarantine? additions*
    additions  = additions/<name>/<root>                 features of other models of the same rows:
                                                         a dataset of its own, named by snapshots
    closing    = index* snapshots* cards current.json    what `finalise` writes, in this order
    plan       = plan/<plan-id>.parquet part*            immutable
    part       = plan/<plan-id>/<number>.parquet         rows of a plan of many, immutable
               | plan/<plan-id>.estimate.json            only from earlier releases: an estimate
    revisions  = revisions/<number>.json                 put-if-absent: takes the place of
                                                         dataset.json, says what has changed and why
               | revisions/<content>.parquet             rows that are copied out of other shards
    data       = data/<shard>-<attempt>.zarr/...         Zarr v3 store, one group a stream
               | data/<shard>-<attempt>.parquet          one row a clip, of a long one several
               | data/<shard>-<attempt><suffix>          of any other format, file or folder
    rows       = rows/<shard>-<attempt>.parquet          scalars and provenance of every good row
    quarantine = quarantine/<shard>-<attempt>.parquet    only where a shard has bad rows
    commits    = commits/<shard>.json                    put-if-absent, names all files of the shard
               | commits/<shard>.r<generation>.json      the same, replaces the generation before
    index      = index/<content>.parquet                 immutable, one line a row
    snapshots  = snapshots/<content>.json                immutable: index, plan, dataset.json and
                                                         commits that belong together, with hashes
    current    = current.json                            names the current snapshot, its cards and
                                                         earlier snapshots; replaced if unchanged
    cards      = README.md croissant.json
               | provenance.jsonld                       not in datasets of earlier releases
    shard      = five or more digits       attempt = eight hex digits
    generation = 1, 2, ...; 0 is the record without a suffix, the highest one counts
    content    = start of the file's own sha256
    number     = 00001, 00002, ...; the highest one counts

A revision changes which rows there are (an update) or which shard has them (a compaction). Its plan
keeps the ids of unchanged shards and gives new ids, never used before, to all others. Commits of
shards that it drops belong to older snapshots only.

A file that no commit names is garbage of a crashed attempt. Names that start with a dot are
unfinished work: no listing shows them and no reader trusts them. Nothing is edited or renamed later
but `current.json` and the cards, which are replaced whole, and the version in dataset.json, which
is raised before a commit of an earlier version is replaced. Folder `rows/` is not in `data/`, so
that `data/` holds feature files only.

Version 1 has neither snapshots nor current.json nor generations. Versions 1 and 2 have zstd instead
of blosc in their Zarr stores, and no statistics in commits and snapshots. Streams of frames in int8
have scales between them, see `formats/values.py`, and say `layout: int8` in dataset.json; a release
that does not know this layout refuses it.
"""

from __future__ import annotations

import re
import secrets

LAYOUT_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)

DATASET_FILE = "dataset.json"
DRIVER_FILE = "driver.json"
CREW = "crew"
CLAIMS = "claims"
README_FILE = "README.md"
CROISSANT_FILE = "croissant.json"
PROVENANCE_FILE = "provenance.jsonld"
CURRENT_FILE = "current.json"

_SHARD = re.compile(r"[0-9]{5,}")
_COMMIT = re.compile(r"commits/([0-9]{5,})(?:\.r([1-9][0-9]*))?\.json")
_REVISION = re.compile(r"revisions/([0-9]{5,})\.json")
_PLAN_PART = re.compile(r"plan/([^/.]+)(?:/[0-9]{5,}\.parquet|\.estimate\.json)")
_ATTEMPT = re.compile(r"[0-9a-f]{8}")
_SUFFIX = re.compile(r"(?:\.[0-9A-Za-z_-]+)+")
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")


def _stem(shard_id: str, attempt: str) -> str:
    if not _SHARD.fullmatch(shard_id):
        raise ValueError(f"a shard id is five or more digits, got {shard_id!r}")
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"an attempt is eight lower-case hex digits, got {attempt!r}")
    return f"{shard_id}-{attempt}"


def _named(kind: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a {kind} id is letters, digits, _ and -, got {name!r}")
    return name


def claim_path(plan_id: str, block: int, number: int) -> str:
    return f"{CLAIMS}/{_named('plan', plan_id)}/{block:05d}.{number}.json"


def is_readable(version: object) -> bool:
    """Return True if this release reads files of a layout version."""
    return version in READABLE_VERSIONS and not isinstance(version, bool)


def is_shard_id(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def is_suffix(text: str) -> bool:
    """Return True if names of data files may have this suffix."""
    return _SUFFIX.fullmatch(text) is not None


def data_path(shard_id: str, attempt: str, suffix: str) -> str:
    if not is_suffix(suffix):
        raise ValueError(f"a suffix is like .parquet, got {suffix!r}")
    return f"data/{_stem(shard_id, attempt)}{suffix}"


def rows_path(shard_id: str, attempt: str) -> str:
    return f"rows/{_stem(shard_id, attempt)}.parquet"


def quarantine_path(shard_id: str, attempt: str) -> str:
    return f"quarantine/{_stem(shard_id, attempt)}.parquet"


def commit_path(shard_id: str, generation: int = 0) -> str:
    _stem(shard_id, "00000000")
    if generation < 0:
        raise ValueError(f"a generation is 0 or more, got {generation}")
    return f"commits/{shard_id}.r{generation}.json" if generation else f"commits/{shard_id}.json"


def parse_commit_path(rel: str) -> tuple[str, int] | None:
    """Return shard id and generation of a commit record's path; None for other paths."""
    match = _COMMIT.fullmatch(rel)
    return None if match is None else (match.group(1), int(match.group(2) or 0))


def plan_path(plan_id: str) -> str:
    return f"plan/{_named('plan', plan_id)}.parquet"


def revision_path(number: int) -> str:
    if number < 1:
        raise ValueError(f"revisions are counted from 1, got {number}")
    return f"revisions/{number:05d}.json"


def parse_revision_path(rel: str) -> int | None:
    """Return the number of the revision at a path; None for other paths."""
    match = _REVISION.fullmatch(rel)
    return None if match is None else int(match.group(1))


def carried_path(content: str) -> str:
    """Return the path of the table of rows that a revision copies."""
    return f"revisions/{_named('table', content)}.parquet"


def part_path(plan_id: str, number: int) -> str:
    return f"plan/{_named('plan', plan_id)}/{number:05d}.parquet"


def plan_of_part(rel: str) -> str | None:
    """Return the path of the plan of a part or an estimate; None for other paths."""
    match = _PLAN_PART.fullmatch(rel)
    return None if match is None else plan_path(match.group(1))


def addition_path(name: str) -> str:
    return f"additions/{_named('addition', name)}"


def index_path(content: str) -> str:
    return f"index/{_named('index', content)}.parquet"


def snapshot_path(content: str) -> str:
    return f"snapshots/{_named('snapshot', content)}.json"


def new_attempt() -> str:
    """Return a new attempt id, unique for each try of a shard."""
    return secrets.token_hex(4)
