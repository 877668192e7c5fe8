"""Bombs in YAML and JSON are refused for what they would unfold to; ordinary documents are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from earmill.pipeline.common.errors import CommitError, LockedError, SpecError
from earmill.pipeline.common.untrusted import (
    MAX_ALIASES,
    MAX_DEPTH,
    MAX_JSON_CHARS,
    MAX_VALUES,
    MAX_YAML_BYTES,
    TooMuchError,
    loads_json,
)
from earmill.pipeline.dataset.commit_record import read_commit
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.yaml_overrides import apply_overrides, load_yaml
from earmill.pipeline.storage.layout import Layout


def bomb(levels: int = 9, width: int = 9) -> str:
    """`a9` is a list of nine times `a8`, and so on: 400 million values in 400 bytes."""
    lines = ["a0: &a0 [x, x, x]"]
    for level in range(1, levels):
        names = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} [{names}]")
    return "\n".join(lines)


JOB = """
source: {kind: files, uri: speech}
extract:
- model: dau1997
  params:
PARAMS
output: {uri: out}
"""


def in_params(text: str) -> str:
    return JOB.replace("PARAMS", "\n".join(f"    {line}" for line in text.splitlines()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(), f"more than {MAX_VALUES:,} values"),
        (bomb().replace("[", "{k: [").replace("]", "]}"), f"more than {MAX_VALUES:,} values"),
        ("a: &a [*a]", "an alias to the value it stands in"),
        ("a: &a {b: {c: *a}}", "an alias to the value it stands in"),
        ("a: &a x\nb: [" + "*a, " * (MAX_ALIASES + 1) + "]", f"more than {MAX_ALIASES} aliases"),
        ("a: " + "[" * 5000, f"more than {MAX_DEPTH} levels"),
        ("a: " + "{a: " * 5000, f"more than {MAX_DEPTH} levels"),
        ("a:\n" + "".join(" " * i + "- \n" for i in range(1, 60)), f"more than {MAX_DEPTH} levels"),
    ],
)  # fmt: skip
def test_a_bomb_is_refused_wherever_it_is(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_yaml(text, name="job.yaml")
    if "\n -" not in text:
        with pytest.raises(SpecError, match=said):
            load_yaml(in_params(text), name="job.yaml")


def test_a_bomb_in_an_override_and_in_a_job_file(tmp_path: Path) -> None:
    flow = "{" + bomb().replace("\n", ", ") + "}"
    with pytest.raises(SpecError, match=r"--set extract\.0\.params: refused"):
        apply_overrides({"extract": [{}]}, [f"extract.0.params={flow}"])
    (tmp_path / "job.yaml").write_text(in_params(bomb()))
    with pytest.raises(SpecError, match="refused: more than"):
        JobSpec.load(tmp_path / "job.yaml")


def test_a_job_file_without_end_is_refused() -> None:
    with pytest.raises(SpecError, match=f"at most {MAX_YAML_BYTES:,} bytes"):
        load_yaml("#" * (MAX_YAML_BYTES + 1), name="job.yaml")


def test_aliases_as_people_use_them_still_work() -> None:
    text = "a: &rate {frame_rate_hz: 100}\nb: *rate\nc: [*rate, *rate]"
    same = {"frame_rate_hz": 100}
    assert load_yaml(text, name="x") == {"a": same, "b": same, "c": [same, same]}


@pytest.mark.parametrize("text", ["a: 2024-13-01", "a: " + "1" * 5000, "a: 1:99:1x\nb: !!int x"])
def test_values_that_no_constructor_takes_are_one_line(text: str) -> None:
    with pytest.raises(SpecError, match=r"^job: not valid YAML") as caught:
        load_yaml(text, name="job")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["*.wav", "**/*.flac", "*", "&x", "!x", "%x", "@x", "`x", "|x", ">x"]
)
def test_an_override_that_begins_like_yaml_for_something_else_is_text(value: str) -> None:
    assert apply_overrides({}, [f"source.glob={value}"]) == {"source": {"glob": value}}


def test_in_a_file_the_missing_quotes_are_named() -> None:
    for text in ("source: {glob: *.wav}", "source:\n  glob: *wav"):
        with pytest.raises(SpecError, match=r"put quotes around a value that begins with \*"):
            load_yaml(text, name="job.yaml")


def test_the_json_of_an_output_may_be_anybody_s(tmp_path: Path) -> None:
    """Lock, commits and current index: each is one line of its own kind of error."""
    layout = Layout.open(tmp_path)
    deep = b"[" * 100_000
    layout.write_bytes("commits/00000.json", deep)
    with pytest.raises(CommitError, match="recursion limit"):
        read_commit(layout, "00000")
    layout.write_bytes("driver.json", deep)
    with pytest.raises(LockedError, match="recursion limit"):
        DriverLock(layout).__enter__()


def test_json_of_any_depth_and_size_fails_as_a_value_error() -> None:
    assert loads_json('{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(TooMuchError, match="nested too deeply"):
            loads_json(text)
    with pytest.raises(TooMuchError, match="at most"):
        loads_json(" " * (MAX_JSON_CHARS + 1))
