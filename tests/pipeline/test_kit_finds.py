"""The conformance kit finds what a source or a format may get wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.sources import base as sources_base
from earmill.testing.formats import sample_rows
from tests.pipeline import test_strangers as strangers
from tests.pipeline.test_strangers import FILES, forget, put

READ_BACK = "what_is_read_back_is_what_was_written"
COUNTED = "the_files_are_as_many_as_was_said"
STABLE = "rows_have_stable_ids_in_a_stable_order"
BYTES = "every_row_gives_its_bytes_in_any_order"
SECTION = "the_section_is_a_part_of_the_job"
FAILURES = (AssertionError, EarmillError, pytest.fail.Exception)


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    """The modules under test have the same names every time."""
    forget()
    yield
    forget()


def changed(module: str, old: str, new: str) -> dict[str, str]:
    """The text of a stranger's module with a mistake in it."""
    text = (FILES / f"{module}.py").read_text()
    assert text.count(old) >= 1
    clock = "from time import perf_counter_ns\nfrom typing import Any"
    return {module: text.replace(old, new).replace("from typing import Any", clock, 1)}


def call(suite: Any, test: str, given: dict[str, Any]) -> None:
    """One test of a suite, with fixtures by their names."""
    check = getattr(suite, f"test_{test}")
    check(**{name: given[name] for name in inspect.signature(check).parameters})


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("savez(file, ", "savez(file, t=perf_counter_ns(), ", "equal_rows_give_equal_bytes"),
        ("[span.first : span.last].copy()", "[span.first :]", "every_row_is_read_at_random"),
        ("[span.start :]", "[max(0, span.start - 1) :]", "every_row_is_read_at_random"),
        ("ids[span.row] != span.row_id", "False", "an_index_of_another_file_is_refused"),
        ("span.last > sizes[span.row]", "False", "an_index_of_another_file_is_refused"),
        (
            "[len(each) for each in values]",
            "[7] * len(rows)",
            READ_BACK,
        ),
        (
            'suffix = ".npz"',
            'suffix = ".npz"; objects = lambda *a: 2',
            COUNTED,
        ),
    ],
)
def test_a_mistake_of_a_format(
    old: str, new: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = changed("npz_shards", old, new)
    monkeypatch.syspath_prepend(str(put(tmp_path / "site", **texts)))
    suite = strangers.TestNpz()
    written = suite.write(tmp_path / "one", sample_rows("float16"), "float16")
    with pytest.raises(FAILURES):
        call(suite, test, {"written": written, "tmp_path": tmp_path})


def test_a_format_that_takes_damage_for_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checksum, a changed byte is another value."""
    old, new = "np.savez(file, **arrays)", "pickle.dump(arrays, file)"
    texts = changed("npz_shards", old, f"import pickle; {new}")
    text = texts["npz_shards"].replace("np.load(file) as held", "nullcontext(load(file)) as held")
    head = "from contextlib import nullcontext\nfrom pickle import load\nfrom pathlib import Path"
    texts["npz_shards"] = text.replace("from pathlib import Path", head)
    monkeypatch.syspath_prepend(str(put(tmp_path / "site", **texts)))
    suite = strangers.TestNpz()
    written = suite.write(tmp_path / "one", sample_rows("float16"), "float16")
    call(suite, "every_row_is_read_at_random", {"written": written})
    with pytest.raises(AssertionError, match="not equal"):
        call(suite, "a_changed_byte_is_found_or_harmless", {"written": written})


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("sources.AbsentError(", "sources.SourceOutage(", "a_row_that_is_lost_is_a_bad_row"),
        ("Blob(data=archive", "sources.Blob(data=b'' or archive", None),
        (
            "archive.infolist()",
            "reversed(archive.infolist())",
            STABLE,
        ),
        ("position=position", "position=0", STABLE),
        (
            "archive.read(item.row_id)",
            "archive.read('z.wav')",
            BYTES,
        ),
        (
            "        uri: The archive",
            "        url: The archive",
            SECTION,
        ),
        ('include={"kind", "uri"}', 'include={"uri"}', "what_it_says_of_itself_can_be_stored"),
        (
            "with self._archive() as archive:\n            if item",
            "try:\n            archive = self._archive().__enter__()\n"
            "        except OSError:\n            raise sources.UnreadableError('no') from None\n"
            "        else:\n            if item",
            "an_outage_is_no_property_of_a_row",
        ),
    ],
)
def test_a_mistake_of_a_source(
    old: str, new: str, test: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = changed("zipped_clips", old, new)
    monkeypatch.syspath_prepend(str(put(tmp_path / "site", **texts)))
    monkeypatch.setattr(sources_base, "FETCH_RETRIES", RetryPolicy(budget_s=0.0))
    suite = strangers.TestZipped()
    given = {"made": suite.make(tmp_path), "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    if test is None:  # no mistake
        return call(suite, BYTES, given)
    with pytest.raises(FAILURES) as caught:
        call(suite, test, given)
    # pytest -vv spells out where long values differ: of a file that takes minutes.
    assert "RIFF" not in str(caught.value) and "Timeout" not in str(caught.value)
