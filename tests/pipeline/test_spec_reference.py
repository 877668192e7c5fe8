"""docs/spec.md is what the schema says, and says something of every key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from amtcore.features.parameters import argument_texts
from amtcore.features.spike_encoder import SpikeOptions
from earmill.pipeline.spec.reference import reference, sections, type_text

PAGE = Path(__file__).parents[2] / "docs" / "spec.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: earmill spec > docs/spec.md"


@pytest.mark.parametrize(("title", "model"), sections(), ids=[title for title, _ in sections()])
def test_every_key_has_a_meaning_and_a_row(title: str, model: type[BaseModel]) -> None:
    section = reference().split(f"## {title}\n")[1].split("\n## ")[0]
    for name, field in model.model_fields.items():
        assert field.description, f"{title}: {name}"
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4 and all(cells), row
        assert (cells[2] == "required") == field.is_required()


def test_stream_options_are_those_that_are_checked() -> None:
    options = reference().split("## Stream options")[1].split("\n## ")[0]
    for name in (*SpikeOptions.__dataclass_fields__, "frame_rate_hz", "unit", "pool"):
        assert f"| `{name}` |" in options


def test_types_are_in_words_with_their_bounds() -> None:
    def words(**entry: object) -> str:
        return type_text(entry, {})

    assert words(type="number", exclusiveMinimum=0) == "number > 0"
    assert words(type="number", minimum=0, maximum=1) == "number >= 0 <= 1"
    assert words(anyOf=[{"type": "integer", "minimum": 1}, {"type": "null"}]) == (
        "whole number >= 1 or null"
    )
    assert words(type="array", items={"enum": ["a", "b"]}) == "list of `a`, `b`"


def test_args_of_a_docstring_end_where_the_next_part_begins() -> None:
    docstring = """What.

    Args:
        a: One
            and more.
        b: Two: three.

    Shape:
        c: not this.
    """
    assert argument_texts(docstring) == {"a": "One and more.", "b": "Two: three."}
    assert argument_texts(None) == {}
