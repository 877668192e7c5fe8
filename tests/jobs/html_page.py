"""A page as a browser's parser sees it: elements, their attributes and texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

# Elements that have no end, in HTML and in the SVG of our pages.
EMPTY = frozenset({"meta", "link", "br", "input"})


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = {name.strip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            one
            for one in self.walk()
            if one.tag == tag and wanted.items() <= one.attributes.items()
        ]

    def by_id(self, name: str) -> Element:
        (found,) = [one for one in self.walk() if one.attributes.get("id") == name]
        return found

    @property
    def text(self) -> str:
        parts = (each if isinstance(each, str) else each.text for each in self.children)
        return "".join(parts)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is there twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.stack[-1].children.append(element)
        if tag not in EMPTY:
            self.stack.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1].tag == tag, f"{tag} ends while {self.stack[-1].tag} is open"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.stack[-1].children.append(data)


def parsed(page: str) -> Element:
    """The whole page; every element must be closed where it belongs."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (root,) = parser.stack
    return root
