"""Azure's blob service as adlfs and obstore use it here: one container, block blobs, conditions.

Written after Microsoft's reference of the interface; `make test-stores` holds the tests that use it
against Azurite as well.
"""

from __future__ import annotations

import re
from urllib.parse import unquote
from xml.sax.saxutils import escape

from werkzeug.wrappers import Request, Response

from tests.pipeline.store_stand_in import StandIn, ranged

ACCOUNT = "devstoreaccount1"
# The one that Microsoft publishes for its emulators.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
DATE = "Fri, 02 Jan 2026 03:04:05 GMT"


class AzureStandIn(StandIn):
    """One container behind a WSGI application.

    Attributes:
        blocks: Name -> blocks that no list names yet.
    """

    def __init__(self, container: str = "out") -> None:
        super().__init__()
        self.container = container
        self.blocks: dict[str, dict[str, bytes]] = {}

    def _answer(self, request: Request) -> Response:
        root = f"/{ACCOUNT}/{self.container}"
        if not (request.path + "/").startswith(f"{root}/"):
            return refused(404, "ContainerNotFound")
        name = request.path.removeprefix(root).strip("/")
        if not name:
            if request.args.get("comp") == "batch":
                return self._deleted(request)
            listing = request.args.get("comp") == "list"
            return self._listed(request) if listing else Response(headers=tags(0))
        if request.method == "PUT":
            return self._put(request, name)
        if name not in self.objects:
            return refused(404, "BlobNotFound")
        if request.method == "DELETE":
            del self.objects[name]
            return Response(status=202)
        content, version = self.objects[name]
        wanted = request.headers.get("x-ms-range") or request.headers.get("Range")
        return ranged(content, wanted, tags(version))

    def _put(self, request: Request, name: str) -> Response:
        content = request.get_data()
        if request.args.get("comp") == "block":
            self.blocks.setdefault(name, {})[request.args["blockid"]] = content
            return Response(status=201)
        with self._lock:
            if request.headers.get("If-None-Match") == "*" and name in self.objects:
                return refused(409, "BlobAlreadyExists")
            tag = request.headers.get("If-Match")
            if tag is not None and tag != f'"{self.objects.get(name, (b"", 0))[1]}"':
                return refused(412, "ConditionNotMet")
            if request.args.get("comp") == "blocklist":
                named = re.findall(r"<(?:Latest|Uncommitted)>(.*?)</", content.decode())
                blocks = self.blocks.pop(name)
                content = b"".join(blocks[block] for block in named)
            version = next(self._versions)
            self.objects[name] = (content, version)
        return Response(status=201, headers=tags(version))

    def _deleted(self, request: Request) -> Response:
        """A batch of deletions; each has an answer of its own."""
        named = re.findall(
            rf"DELETE /{ACCOUNT}/{self.container}/(\S+) HTTP", request.get_data(True, True)
        )
        answers = []
        for number, name in enumerate(map(unquote, named)):
            status = "404 Not Found" if self.objects.pop(name, None) is None else "202 Accepted"
            code = "x-ms-error-code: BlobNotFound\r\n" if status[0] == "4" else ""
            answers.append(
                "--batch\r\nContent-Type: application/http\r\n"
                f"Content-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n{code}\r\n"
            )
        return Response(
            "".join([*answers, "--batch--"]), 202, mimetype="multipart/mixed; boundary=batch"
        )

    def _listed(self, request: Request) -> Response:
        prefix, delimiter = request.args.get("prefix", ""), request.args.get("delimiter", "")
        entries, folders = [], set()
        for name in sorted(name for name in self.objects if name.startswith(prefix)):
            head, separator, _ = name[len(prefix) :].partition(delimiter or "\0")
            if separator:
                folders.add(prefix + head + separator)
                continue
            content, version = self.objects[name]
            entries.append(
                f"<Blob><Name>{escape(name)}</Name><Properties><Etag>{version}</Etag>"
                f"<Last-Modified>{DATE}</Last-Modified><Content-Length>{len(content)}"
                "</Content-Length><Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            )
        entries += [f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders]
        body = (
            '<?xml version="1.0" encoding="utf-8"?>'
            f'<EnumerationResults ContainerName="{self.container}">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{''.join(entries)}</Blobs>"
            "<NextMarker/></EnumerationResults>"
        )
        return Response(body, mimetype="application/xml")


def tags(version: int) -> dict[str, str]:
    """What every answer about a blob says of it."""
    return {"ETag": f'"{version}"', "Last-Modified": DATE, "x-ms-blob-type": "BlockBlob"}


def refused(status: int, code: str) -> Response:
    """An error as the service words it."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return Response(body, status, {"x-ms-error-code": code}, mimetype="application/xml")
