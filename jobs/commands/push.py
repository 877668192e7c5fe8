"""`earmill push`: upload a finished dataset to the Hugging Face hub in one commit."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.process import OutputLost
from earmill.jobs.console.terminal import say, say_json
from earmill.pipeline.common.text import audio, bytes_text

LINE_EVERY_S = 5.0


def push(
    uri: options.DatasetUri,
    hub_id: Annotated[
        str, typer.Argument(metavar="HUB_ID", help="Dataset on the hub: user/name; made if new.")
    ],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Visibility of a new dataset; else the account's default."
        ),
    ] = None,
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", help="The branch to commit to; made if new.")
    ] = "main",
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be pushed; sends nothing.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="First compare the sha256 of every file, not sizes alone."),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Push even if the repository holds another dataset.")
    ] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Upload a finished dataset to the Hugging Face hub in one commit.

    The token comes from HF_TOKEN or `hf auth login`. After an interruption run the command again:
    files that the hub has are not sent again.
    """
    from earmill.pipeline.hub.push import Progress, contents_of
    from earmill.pipeline.storage.layout import open_output

    with open_output(uri, storage_options) as layout:
        contents = contents_of(layout, hashes=verify)
    stored, licenses = contents.report, contents.dataset.licenses
    if dry_run and as_json:
        fields = {
            "event": "would_push",
            "hub_id": hub_id,
            "rows": stored.rows_ok,
            "rows_bad": stored.rows_bad,
            "audio_s": round(stored.seconds, 3),
            "files": len(contents.files),
            "bytes": contents.bytes,
            "licenses": licenses,
        }
        say_json(fields)
        return
    if dry_run:
        stated = licenses.get("features")
        licence = (stated.get("name") or stated["id"]) if stated else "not stated"
        say(
            f"would push to {hub_id}: {stored.rows_ok:,} rows ({stored.rows_bad:,} in quarantine), "
            f"{audio(round(stored.seconds, 3))} audio, {len(contents.files):,} files, "
            f"{bytes_text(contents.bytes)}; licence of the features: {licence}"
        )
        return

    import huggingface_hub

    from earmill.pipeline.hub.push import push as upload
    from earmill.pipeline.hub.repo import HubRepo

    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.logging.set_verbosity_error()  # its warnings quote signed addresses
    printed_s = 0.0

    def tell(progress: Progress) -> None:
        nonlocal printed_s
        if as_json:
            with suppress(OutputLost):  # the upload goes on
                say_json({"event": "push", **asdict(progress)})
        elif time.monotonic() - printed_s >= LINE_EVERY_S:
            printed_s = time.monotonic()
            say(
                f"{progress.files:,} of {progress.files_total:,} files, "
                f"{bytes_text(progress.bytes)} of {bytes_text(progress.bytes_total)}",
                sys.stderr,
            )

    done = upload(
        layout,
        contents,
        HubRepo(hub_id, revision),
        private=private,
        message=message,
        replace_other=replace,
        **({} if quiet else {"on_progress": tell}),
    )
    sent = done.progress
    if as_json:
        result = {key: value for key, value in asdict(done).items() if key != "progress"}
        say_json({"event": "pushed", **result, **asdict(sent)})
    elif done.is_new:
        there = sent.files - sent.files_sent
        beside = f" beside {there:,} that were there," if there else ""
        say(
            f"pushed {sent.files_sent:,} files, {bytes_text(sent.bytes_sent)},{beside} to "
            f"{done.url}, commit {done.commit[:12]}"
        )
    else:
        say(f"nothing to push: {done.url} has this snapshot, commit {done.commit[:12]}")
