"""Links between files of the repository become links between pages of the site.

A page's text links to files as they lie in the repository, so that it reads well there too. What
the site holds is linked to; of a source file or a folder only the text stays; what is nowhere is a
warning, which a strict build does not pass. Links to other hosts are not fetched:
`python -m docs.builder.links` lists them.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

_LOG = logging.getLogger("mkdocs.hooks.links")
_FENCE = re.compile(r"(^(```+|~~~+).*?^\2[ \t]*$)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def rewrite(text: str, *, origin: str, page: str, held: Mapping[str, str], root: Path) -> str:
    """The text with its links as the site has them.

    Args:
        text: Markdown. origin: The file it is from, in the repository. page: Its name in the site.
        held: What the site holds: file in the repository -> name in the site.
        root: The repository.
    """

    def replaced(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if found in held:
            name = posixpath.relpath(held[found], posixpath.dirname(page) or ".")
            return f"{image}[{label}]({name}{hash_}{anchor})"
        if not (root / found).exists():
            _LOG.warning("%s links to %s, which is not in the repository", origin, target)
        return label

    parts = _FENCE.split(text)  # text, fence, its mark, text, ...
    parts[::3] = [_LINK.sub(replaced, part) for part in parts[::3]]
    del parts[2::3]
    return "".join(parts)


def external(folder: Path) -> dict[str, list[str]]:
    """Every address of another host in the pages of a folder, with the pages that name it."""
    found: dict[str, list[str]] = {}
    for page in sorted(folder.rglob("*.md")):
        prose = "".join(_FENCE.split(page.read_text())[::3])
        for address in sorted(set(re.findall(r"\]\((https?://[^()\s]+)\)", prose))):
            found.setdefault(address, []).append(page.relative_to(folder).as_posix())
    return found


if __name__ == "__main__":
    for address, pages in sorted(external(Path("docs")).items()):
        print(address, *pages)
