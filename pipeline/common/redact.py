"""Removal of secrets from URIs and texts, before they are stored or printed. Scheme, host, path and
harmless parameters stay, so that a row id still names its object, also if it is signed again.
`redact` is idempotent."""

from __future__ import annotations

import re

MASK = "***"

# Names of secrets in a query: words of the name, or its end.
_SECRET_NAME = re.compile(
    r"(^|[-_.])(sig|signature|token|secret|pass|passwd|password|pwd|key|credentials?|auth|policy"
    r"|authorization|session|jwt|code|sas|hmac|ticket|otp)($|[-_.])"
    r"|(token|secret|password|apikey|accesskey|accesskeyid|accessid|signature|sessionid)$"
    r"|^key-pair-id$|^x-(amz|goog|oss|cos|obs)-",
    re.IGNORECASE,
)
# Parameters of a signature, in the dialects of the object stores.
_SIGNED_WITH = frozenset(
    "expires se st sp sr sv spr sip ses skoid sktid skt ske sks skv sdd saoid suoid scid".split()
)
# Schemes in which `user@` names a container, or a user without a password.
_USER_IS_PUBLIC = frozenset(
    "abfs abfss wasb wasbs sftp ssh ftp ftps smb hdfs webhdfs github".split()
)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`]+")
_TRAILING = ".,;:)]}"
_HEADER = re.compile(
    r"\b(Authorization\W+(?:Bearer|Basic)\s+|Bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE
)


_CONNECTION = re.compile(r"\b(AccountKey|SharedAccessSignature)=[^;\s'\"]+", re.IGNORECASE)


def redact(uri: str) -> str:
    """Return the URI without its secrets; a plain path does not change.

    Example:
        >>> redact("https://me:pw@host/a.wav?id=3&X-Amz-Date=1&X-Amz-Signature=2")
        'https://***@host/a.wav?id=3&***'
    """
    return "::".join(_link(link) for link in uri.split("::"))


def redact_uris(text: str) -> str:
    return _URI.sub(_found, text) if "://" in text else text


def redact_text(text: str) -> str:
    """Remove the secrets of URIs and authorisation headers in a message, and escape bytes of file
    names that are not text."""
    clean = _HEADER.sub(rf"\1{MASK}", redact_uris(text))
    clean = _CONNECTION.sub(rf"\1={MASK}", clean)
    return clean.encode("utf-8", "backslashreplace").decode()


def has_secrets(uri: str) -> bool:
    return redact(uri) != uri


def _found(match: re.Match[str]) -> str:
    uri = match[0].rstrip(_TRAILING)
    return redact(uri) + match[0][len(uri) :]


def _link(link: str) -> str:
    scheme, separator, rest = link.partition("://")
    if not separator:
        return link
    rest, hash_mark, fragment = rest.partition("#")
    rest, question, query = rest.partition("?")
    if fragment and _clean_query(fragment) != fragment:
        fragment = MASK
    rest = _without_user(scheme.lower(), rest)
    return scheme + separator + rest + question + _clean_query(query) + hash_mark + fragment


def _without_user(scheme: str, rest: str) -> str:
    """Return host and path, with a mask for a user in front of the host."""
    host, slash, path = rest.partition("/")
    port = host.partition(":")[2]
    if "@" not in host:
        # A secret may hold a slash, so that the host seems to end early: s3://key:sec/ret@bucket/x.
        if not port or "@" not in path or (port.isdigit() and scheme in ("http", "https")):
            return rest
        return f"{MASK}@{path.rpartition('@')[2]}"
    user, _, address = host.rpartition("@")
    if scheme in _USER_IS_PUBLIC and (":" not in user or scheme == "github"):
        return rest
    return f"{MASK}@{address}{slash}{path}"


def _clean_query(query: str) -> str:
    names = {part: part.partition("=")[0].lower() for part in query.split("&")}
    hidden = {part for part, name in names.items() if "=" in part and _SECRET_NAME.search(name)}
    if not hidden:
        return query
    hidden |= {part for part, name in names.items() if name in _SIGNED_WITH or part == MASK}
    return "&".join([*(part for part in query.split("&") if part not in hidden), MASK])
