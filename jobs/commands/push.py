"""`earmill push`: a finished dataset to the Hugging Face hub, in one commit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands.options import (
    AsJson,
    DatasetUri,
    Quiet,
    StorageOptions,
    parse_storage_options,
)
from earmill.jobs.console.process import OutputLost
from earmill.jobs.console.terminal import say, say_json

if TYPE_CHECKING:
    from earmill.pipeline.hub.contents import Contents
    from earmill.pipeline.hub.push import Progress

LINE_EVERY_S = 5.0


def push(
    uri: DatasetUri,
    hub_id: Annotated[
        str, typer.Argument(metavar="HUB_ID", help="Dataset on the hub: user/name; made if new.")
    ],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Of a new one; else as the account's default says."
        ),
    ] = None,
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", help="The branch to commit to; made if new.")
    ] = "main",
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be pushed; asks the hub nothing.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="First compare the sha256 of every file, not sizes alone."),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where the repository holds another dataset.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    storage_options: StorageOptions = None,
) -> None:
    """Upload a finished dataset to the Hugging Face hub in one commit; again goes on.

    The token is that of HF_TOKEN or of `hf auth login`. Files that the hub has are not sent again.
    """
    from earmill.pipeline.hub.contents import contents_of
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.storage.store_errors import store_errors

    layout = Layout.open(uri, parse_storage_options(storage_options))
    with store_errors(layout.url()):
        contents = contents_of(layout, hashes=verify)
    if dry_run:
        found = {"hub_id": hub_id, **_counts(contents), "licenses": contents.dataset.licenses}
        say_json({"event": "would_push", **found}) if as_json else say(_shown(found))
        return

    import huggingface_hub

    from earmill.pipeline.hub.push import push as upload
    from earmill.pipeline.hub.repo import HubRepo

    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.logging.set_verbosity_error()  # its warnings quote signed addresses
    repo = HubRepo(hub_id, revision)
    done = upload(
        layout,
        contents,
        repo,
        private=private,
        message=message,
        replace_other=replace,
        **({} if quiet else {"on_progress": _teller(as_json)}),
    )
    if as_json:
        result = {key: value for key, value in asdict(done).items() if key != "progress"}
        say_json({"event": "pushed", **result, **asdict(done.progress)})
    elif done.is_new:
        say(f"pushed {_sent(done.progress)} to {done.url}, commit {done.commit[:12]}")
    else:
        say(f"nothing to push: {done.url} has this snapshot, commit {done.commit[:12]}")


def _counts(contents: Contents) -> dict[str, Any]:
    return {
        "rows": contents.report.rows_ok,
        "rows_bad": contents.report.rows_bad,
        "audio_s": round(contents.report.seconds, 3),
        "files": len(contents.files),
        "bytes": contents.bytes,
    }


def _shown(found: dict[str, Any]) -> str:
    from earmill.pipeline.common.text import audio, bytes_text

    stated = found["licenses"].get("features")
    licence = (stated.get("name") or stated["id"]) if stated else "not stated"
    return (
        f"would push to {found['hub_id']}: {found['rows']:,} rows ({found['rows_bad']:,} in "
        f"quarantine), {audio(found['audio_s'])} audio, {found['files']:,} files, "
        f"{bytes_text(found['bytes'])}; licence of the features: {licence}"
    )


def _sent(progress: Progress) -> str:
    from earmill.pipeline.common.text import bytes_text

    text = f"{progress.files_sent:,} files, {bytes_text(progress.bytes_sent)},"
    there = progress.files - progress.files_sent
    return f"{text} beside {there:,} that were there," if there else text


def _teller(as_json: bool) -> Callable[[Progress], None]:
    """Return what tells of a push: a line on standard error now and then, JSON every time.

    An upload goes on where nobody reads its news.
    """
    told_at = 0.0

    def tell(progress: Progress) -> None:
        nonlocal told_at
        from earmill.pipeline.common.text import bytes_text

        if as_json:
            with suppress(OutputLost):
                say_json({"event": "push", **asdict(progress)})
        elif time.monotonic() - told_at >= LINE_EVERY_S:
            told_at = time.monotonic()
            say(
                f"{progress.files:,} of {progress.files_total:,} files, "
                f"{bytes_text(progress.bytes)} of {bytes_text(progress.bytes_total)}",
                sys.stderr,
            )

    return tell
