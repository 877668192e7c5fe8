"""The Hugging Face hub as far as `earmill push` uses it: repositories, large files, commits.

Written after huggingface_hub's requests and the Git LFS batch API. A large file that does not hash
to its name is refused, a commit with one that was never uploaded too, and so is one whose parent is
not the head.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import git_hash
from werkzeug.wrappers import Request, Response

from tests.pipeline.object_stores import serving
from tests.pipeline.store_stand_in import StandIn

TOKEN = "hf_TOKENofThisTest0123456789"
MOST_REGULAR = 10 * 2**20
PAGE = 50


@dataclass
class Repo:
    """A repository: its commits, each with the whole tree, path to content or large file."""

    private: bool | None
    trees: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: dict[str, tuple[str, bytes]], message: str) -> str:
        name = hashlib.sha1(f"{len(self.trees)}{message}".encode()).hexdigest()
        self.trees[name] = tree
        self.branches[branch] = name
        self.messages.append(message)
        return name


class HubStandIn(StandIn):
    """The hub behind a WSGI application.

    Attributes:
        repos: By id. blobs: Large files by sha256. puts: How often each was stored.
        before: Called with every request; what it returns is answered instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.puts: Counter[str] = Counter()
        self.before: Callable[[Request], Response | None] = lambda request: None

    def tree(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a branch with their content."""
        repo = self.repos[repo_id]
        tree = repo.trees[repo.branches[branch]]
        return {
            path: self.blobs[content.decode()] if kind == "lfs" else content
            for path, (kind, content) in tree.items()
        }

    def write(self, repo_id: str, folder: Path, branch: str = "main") -> Path:
        """The files of a branch as a download has them."""
        for path, content in self.tree(repo_id, branch).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder

    def _answer(self, request: Request) -> Response:
        if request.path == "/api/agent-harnesses":  # what huggingface_hub asks of its own accord
            self.seen.pop()
            return said(404, "no such thing")
        early = self.before(request)
        if early is not None:
            return early
        if request.method == "PUT":
            return self._store(request)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return said(401, "Invalid credentials")
        if request.path == "/api/repos/create":
            return self._create(request.get_json(), request.host_url)
        if request.path == "/api/validate-yaml":
            return said(200, warnings=[], errors=[])
        found = re.fullmatch(
            r"/(?:api/)?datasets/([^/]+/[^/.]+)(?:\.git)?/([^/]+)/(.+)", request.path
        )
        if found is None or found[1] not in self.repos:
            return said(404, "Repository not found", code="RepoNotFound")
        act = getattr(self, f"_{found[2]}", None)
        return act(request, self.repos[found[1]], found[3]) if act else said(404, "no such thing")

    def _create(self, wanted: dict[str, Any], here: str) -> Response:
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        url = f"{here}datasets/{repo_id}"
        assert wanted["type"] == "dataset"
        if repo_id in self.repos:
            return said(409, "You already created this dataset repo", url=url)
        visibility = wanted.get("visibility")
        repo = Repo(None if visibility is None else visibility == "private")
        repo.commit("main", {".gitattributes": ("regular", b"*.parquet filter=lfs\n")}, "initial")
        self.repos[repo_id] = repo
        return said(200, url=url)

    def _branch(self, request: Request, repo: Repo, rest: str) -> Response:
        if rest in repo.branches:
            return said(409, "Reference already exists")
        repo.branches[rest] = repo.branches["main"]
        return said(200)

    def _revision(self, request: Request, repo: Repo, rest: str) -> Response:
        if rest not in repo.branches and rest not in repo.trees:
            return said(404, "Invalid rev id", code="RevisionNotFound")
        return said(200, id="x/y", sha=repo.branches.get(rest, rest), tags=[])

    def _tree(self, request: Request, repo: Repo, rest: str) -> Response:
        entries = []
        for path, (kind, content) in sorted(repo.trees[rest].items()):
            entry: dict[str, Any] = {"type": "file", "path": path}
            if kind == "lfs":
                large = self.blobs[content.decode()]
                entry |= {"size": len(large), "oid": git_hash(content)}
                entry["lfs"] = {"oid": content.decode(), "size": len(large), "pointerSize": 130}
            else:
                entry |= {"size": len(content), "oid": git_hash(content)}
            entries.append(entry)
        start = int(request.args.get("cursor", 0))
        answer = Response(json.dumps(entries[start : start + PAGE]), mimetype="application/json")
        if start + PAGE < len(entries):
            url = f"{request.base_url}?recursive=True&cursor={start + PAGE}"
            answer.headers["Link"] = f'<{url}>; rel="next"'
        return answer

    def _resolve(self, request: Request, repo: Repo, rest: str) -> Response:
        commit, _, path = rest.partition("/")
        kind, content = repo.trees[commit][path]
        return Response(self.blobs[content.decode()] if kind == "lfs" else content)

    def _preupload(self, request: Request, repo: Repo, rest: str) -> Response:
        tree = repo.trees[repo.branches[rest]]
        files = []
        for asked in request.get_json()["files"]:
            sample, path = base64.b64decode(asked["sample"]), asked["path"]
            large = b"\0" in sample or asked["size"] > MOST_REGULAR or path.endswith(".parquet")
            kind, content = tree.get(path, ("", b""))
            oid = content.decode() if kind == "lfs" else (git_hash(content) if kind else None)
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return said(200, files=files)

    def _info(self, request: Request, repo: Repo, rest: str) -> Response:
        assert rest == "lfs/objects/batch"
        objects = []
        for asked in request.get_json()["objects"]:
            found = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.blobs:
                found["actions"] = {"upload": {"href": f"{request.host_url}store/{asked['oid']}"}}
            objects.append(found)
        return said(200, objects=objects, transfer="basic")

    def _store(self, request: Request) -> Response:
        content, name = request.get_data(), request.path.rpartition("/")[2]
        if hashlib.sha256(content).hexdigest() != name:
            return said(400, "the content does not have this hash")
        self.blobs[name] = content
        self.puts[name] += 1
        return Response(status=200)

    def _commit(self, request: Request, repo: Repo, rest: str) -> Response:
        head, *lines = (json.loads(line) for line in request.get_data().splitlines())
        if head["value"].get("parentCommit") != repo.branches[rest]:
            return said(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(repo.trees[repo.branches[rest]])
        for line in lines:
            value, path = line["value"], line["value"]["path"]
            if line["key"] == "deletedFile":
                del tree[path]
            elif line["key"] == "file":
                tree[path] = ("regular", base64.b64decode(value["content"]))
            elif value["oid"] not in self.blobs:
                return said(400, f"{path} was never uploaded")
            else:
                tree[path] = ("lfs", value["oid"].encode())
        oid = repo.commit(rest, tree, head["value"]["summary"])
        return said(
            200,
            commitUrl=f"{request.host_url}datasets/x/y/commit/{oid}",
            commitOid=oid,
            pullRequestUrl=None,
        )


def said(status: int, error: str = "", code: str = "", **values: Any) -> Response:
    """An answer of the hub's API."""
    headers = {"X-Error-Code": code} if code else {}
    headers |= {"X-Error-Message": error} if error else {}
    body = json.dumps({"error": error, **values} if error else values)
    return Response(body, status, headers=headers, mimetype="application/json")


@contextmanager
def hub() -> Iterator[tuple[HubStandIn, str]]:
    """A hub on loopback, and its address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    stand_in = HubStandIn()
    with serving(stand_in) as address:
        yield stand_in, address
