"""One dataset repository on the Hugging Face hub, by huggingface_hub; its errors in one line.
huggingface_hub finds the token: no function here takes it, and no message holds it. It also repeats
requests. Only a commit is repeated here, and only while the branch is where it was."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info
from huggingface_hub.utils import (
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

from earmill.pipeline.common.errors import HubError, OutputError, chain, http_status, is_outage
from earmill.pipeline.common.text import one_line
from earmill.pipeline.formats.rows import OutFile

DATASET = "dataset"
MAIN = "main"
# Tries of a commit while the hub does not answer, and the wait between them, in seconds.
COMMIT_TRIES = 4
COMMIT_WAIT_S = 2.0
ASKED_AT_ONCE = 256  # Objects of one question, as huggingface_hub asks them.
CONFLICTS = (409, 412)
REFUSALS = (401, 403)


class HubRepo:
    """A dataset repository `user/name`, and its branch; OutputError for an invalid id, HubError
    without a token."""

    def __init__(self, repo_id: str, branch: str = MAIN) -> None:
        self.repo_id, self.branch = repo_id, branch
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise OutputError(f"expected the id of a dataset as user/name: {error}") from error
        if repo_id.count("/") != 1:
            raise OutputError(f"expected the id of a dataset as user/name, got {repo_id!r}")
        if huggingface_hub.get_token() is None:
            raise HubError("no token for the hub: set HF_TOKEN, or log in with `hf auth login`")
        self._api = HfApi()

    @property
    def url(self) -> str:
        return f"{self._api.endpoint}/datasets/{self.repo_id}"

    def create(self, private: bool | None) -> None:
        """Make the repository and its branch, unless they exist."""
        with self._one_line_errors():
            self._api.create_repo(self.repo_id, repo_type=DATASET, private=private, exist_ok=True)
            if self.branch != MAIN:
                self._api.create_branch(
                    self.repo_id, branch=self.branch, repo_type=DATASET, exist_ok=True
                )

    def head(self) -> str:
        """Return the newest commit of the branch."""
        with self._one_line_errors():
            info = self._api.dataset_info(self.repo_id, revision=self.branch)
            if info.sha is None:
                raise HubError(f"{self.repo_id}: the hub names no commit of {self.branch}")
            return info.sha

    def files(self, commit: str) -> dict[str, RepoFile]:
        """Return every file of a commit, by path; a large file has `lfs`, with its sha256."""
        with self._one_line_errors():
            tree = self._api.list_repo_tree(
                self.repo_id, recursive=True, revision=commit, repo_type=DATASET
            )
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def read(self, path: str, commit: str) -> bytes:
        url = f"{self.url}/resolve/{commit}/{path}"
        with self._one_line_errors():
            answer = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
            hf_raise_for_status(answer)
            return bytes(answer.content)

    def uploaded(self, files: Iterable[OutFile]) -> set[str]:
        """Return the sha256 of the files that the hub holds already, committed or not."""
        found: set[str] = set()
        wanted = [
            UploadInfo(sha256=bytes.fromhex(each.sha256), size=each.bytes, sample=b"")
            for each in files
        ]
        for start in range(0, len(wanted), ASKED_AT_ONCE):
            with self._one_line_errors():
                actions, *_ = post_lfs_batch_info(
                    upload_infos=wanted[start : start + ASKED_AT_ONCE],
                    token=None,
                    repo_type=DATASET,
                    repo_id=self.repo_id,
                    revision=self.branch,
                    endpoint=self._api.endpoint,
                )
            found |= {action["oid"] for action in actions if action.get("actions") is None}
        return found

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload the files that the hub stores as large files; the commit holds the others."""
        with self._one_line_errors():
            self._api.preupload_lfs_files(
                self.repo_id, additions, repo_type=DATASET, revision=self.branch
            )

    def commit(
        self,
        additions: Sequence[CommitOperationAdd],
        removed: Sequence[str],
        *,
        message: str,
        parent: str,
        proof: tuple[str, str],
    ) -> str:
        """Make one commit on top of `parent`, and return its id. The proof, a path and git's hash
        of its content, identifies the commit if the hub's answer was lost."""
        deletions = [CommitOperationDelete(path, is_folder=False) for path in removed]
        for attempt in range(COMMIT_TRIES):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of huggingface_hub, about the card's header
                    return self._api.create_commit(
                        self.repo_id,
                        [*additions, *deletions],
                        commit_message=message,
                        repo_type=DATASET,
                        revision=self.branch,
                        parent_commit=parent,
                    ).oid
            except Exception as error:
                away = is_outage(error)
                if not away and http_status(error) not in CONFLICTS:
                    raise self._hub_error(error) from error
                now, (path, blob) = self.head(), proof
                if now != parent:
                    there = self.files(now).get(path)
                    if there is not None and there.blob_id == blob:
                        return now
                    raise HubError(
                        f"{self.repo_id}: somebody else committed to {self.branch} meanwhile (now "
                        f"{now[:12]}, was {parent[:12]}); nothing of this was committed, what was "
                        "uploaded stays there: look at that commit, then run the same command again"
                    ) from error
                if not away or attempt + 1 == COMMIT_TRIES:
                    raise self._hub_error(error) from error
            time.sleep(COMMIT_WAIT_S * (attempt + 1))
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except (HubError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise self._hub_error(error) from error

    def _hub_error(self, error: BaseException) -> HubError:
        status = http_status(error)
        if status in REFUSALS or (status == 404 and not isinstance(error, RevisionNotFoundError)):
            return HubError(
                f"{self.repo_id}: the hub refuses ({status}); check the id, and that the token in "
                "HF_TOKEN, or of `hf auth login`, may write there"
            )
        if is_outage(error):
            return HubError(
                f"{self.repo_id}: the hub does not answer ({status or _innermost(error)}); what "
                "was uploaded stays there: run the same command again"
            )
        return HubError(f"{self.repo_id}: {_innermost(error)}")


def _innermost(error: BaseException) -> str:
    """Return the text of the server, or of the first cause."""
    if type(error) is ValueError:  # huggingface_hub's own words, of an answer in parts
        return one_line(error)
    for each in chain(error):
        if isinstance(each, HfHubHTTPError):
            return one_line(getattr(each, "server_message", None) or each)
    *_, first = chain(error)
    return f"{type(first).__name__}: {one_line(first)}"
