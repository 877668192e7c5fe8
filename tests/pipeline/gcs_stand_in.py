"""Google Cloud Storage as far as gcsfs and obstore use it here, generations included.

gcsfs speaks the JSON interface, obstore the XML interface. Written after Google's reference of
both; `make test-stores` holds the tests that use the JSON interface against fake-gcs-server too.
"""

from __future__ import annotations

import json
import re
from typing import Any
from xml.sax.saxutils import escape

from werkzeug.wrappers import Request, Response

from tests.pipeline.store_stand_in import StandIn, ranged

XML_DATE = "2026-01-02T03:04:05.000Z"
Upload = tuple[str, bool, bytearray]


class GcsStandIn(StandIn):
    """One bucket behind a WSGI application.

    Attributes:
        uploads: Resumable uploads that were begun and neither finished nor given up.
        parts: Uploads of the XML interface that were begun and neither finished nor given up.
    """

    def __init__(self, bucket: str = "out") -> None:
        super().__init__()
        self.bucket = bucket
        self.uploads: dict[str, Upload] = {}
        self.parts: dict[str, dict[int, bytes]] = {}

    def _answer(self, request: Request) -> Response:
        if f"{request.path}/".startswith(f"/{self.bucket}/"):
            return self._xml_answer(
                request, request.path.removeprefix(f"/{self.bucket}").lstrip("/")
            )
        base = f"/storage/v1/b/{self.bucket}"
        if request.path == f"/upload{base}/o":
            return self._upload(request)
        if request.path == base:
            return answer({"kind": "storage#bucket", "name": self.bucket})
        if request.path == f"{base}/o":
            return self._listed(request)
        found = re.fullmatch(rf"(/download)?{base}/o/(.+)", request.path, re.DOTALL)
        if found is None or found[2] not in self.objects:
            return refused(404, "notFound")
        if request.method == "DELETE":
            del self.objects[found[2]]
            return Response(status=204)
        if request.args.get("alt") == "media" or found[1]:
            return self._content(request, found[2])
        return answer(self._described(found[2]))

    def _described(self, name: str) -> dict[str, str]:
        content, generation = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": self.bucket,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "etag": f"C{generation}",
            "updated": "2026-01-02T03:04:05.000Z",
            "timeCreated": "2026-01-02T03:04:05.000Z",
        }

    def _listed(self, request: Request) -> Response:
        prefix, delimiter = request.args.get("prefix", ""), request.args.get("delimiter", "")
        names, folders = [], set()
        for name in sorted(name for name in self.objects if name.startswith(prefix)):
            head, separator, _ = name[len(prefix) :].partition(delimiter or "\0")
            if separator:
                folders.add(prefix + head + separator)
            else:
                names.append(name)
        found = {"items": [self._described(name) for name in names], "prefixes": sorted(folders)}
        return answer({key: value for key, value in found.items() if value})

    def _content(self, request: Request, name: str) -> Response:
        content, generation = self.objects[name]
        headers = {"ETag": f"C{generation}", "X-Goog-Generation": str(generation)}
        return ranged(content, request.headers.get("Range"), headers)

    def _upload(self, request: Request) -> Response:
        kind, create = request.args["uploadType"], request.args.get("ifGenerationMatch") == "0"
        if kind == "multipart":
            parts = request.get_data().split(b"--==0==")[1:3]
            described, content = (part.split(b"\n\n", 1)[1] for part in parts)
            return self._put(json.loads(described)["name"], content.removesuffix(b"\n"), create)
        key = request.args.get("upload_id")
        if key is None:
            key = f"upload-{next(self._versions)}"
            self.uploads[key] = (request.args["name"], create, bytearray())
            return Response(headers={"Location": f"{request.url}&upload_id={key}"})
        if request.method == "DELETE":
            del self.uploads[key]
            return Response(status=499)
        return self._part(key, request)

    def _part(self, key: str, request: Request) -> Response:
        name, create, content = self.uploads[key]
        first, last, size = map(int, re.findall(r"\d+", request.headers["Content-Range"]))
        content[first : last + 1] = request.get_data()
        if last + 1 < size:
            return Response(status=308, headers={"Range": f"bytes=0-{last}"})
        del self.uploads[key]
        return self._put(name, bytes(content), create)

    def _put(self, name: str, content: bytes, create: bool) -> Response:
        with self._lock:
            if create and name in self.objects:
                return refused(412, "conditionNotMet")
            self.objects[name] = (content, next(self._versions))
            return answer(self._described(name))

    def _xml_answer(self, request: Request, name: str) -> Response:
        if not name:
            return self._xml_listed(request)
        if "uploads" in request.args or "uploadId" in request.args:
            return self._xml_upload(request, name)
        if request.method == "PUT":
            return self._xml_put(request, name, request.get_data())
        if name not in self.objects:
            return Response(xml("Error", Code="NoSuchKey"), 404)
        if request.method == "DELETE":
            del self.objects[name]
            return Response(status=204)
        content, generation = self.objects[name]
        return ranged(content, request.headers.get("Range"), described(generation))

    def _xml_put(self, request: Request, name: str, content: bytes) -> Response:
        with self._lock:
            wanted = request.headers.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != self.objects.get(name, (b"", 0))[1]:
                return Response(xml("Error", Code="PreconditionFailed"), 412)
            generation = next(self._versions)
            self.objects[name] = (content, generation)
        return Response(headers=described(generation))

    def _xml_upload(self, request: Request, name: str) -> Response:
        key = request.args.get("uploadId")
        if key is None:
            key = f"upload-{next(self._versions)}"
            self.parts[key] = {}
            return Response(xml("InitiateMultipartUploadResult", UploadId=key))
        if request.method == "PUT":
            self.parts[key][int(request.args["partNumber"])] = request.get_data()
            return Response(headers={"ETag": f'"{request.args["partNumber"]}"'})
        parts = self.parts.pop(key)
        if request.method == "DELETE":
            return Response(status=204)
        done = self._xml_put(request, name, b"".join(parts[number] for number in sorted(parts)))
        done.set_data(xml("CompleteMultipartUploadResult", ETag=done.headers["ETag"]))
        return done

    def _xml_listed(self, request: Request) -> Response:
        names = sorted(n for n in self.objects if n.startswith(request.args.get("prefix", "")))
        entries = (
            xml("Contents", Key=n, Size=len(self.objects[n][0]), ETag="x", LastModified=XML_DATE)
            for n in names
        )
        return Response(f"<ListBucketResult>{''.join(entries)}</ListBucketResult>")


def described(generation: int) -> dict[str, str]:
    """Describe an object in the head of an answer of the XML interface."""
    return {
        "ETag": f'"C{generation}"',
        "x-goog-generation": str(generation),
        "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
    }


def xml(element: str, **fields: Any) -> str:
    """An element with others in it."""
    inner = "".join(f"<{name}>{escape(str(text))}</{name}>" for name, text in fields.items())
    return f"<{element}>{inner}</{element}>"


def answer(body: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(json.dumps(body), status, mimetype="application/json")


def refused(status: int, reason: str) -> Response:
    """An error as Google's services word it."""
    error = {"code": status, "message": reason, "errors": [{"reason": reason}]}
    return answer({"error": error}, status)
