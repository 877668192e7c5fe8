"""The builder of the site: links, tables of results, formulas, references, drawings."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import ModuleType

import pytest

import amtcore
import earmill
from docs.builder import hooks, notebooks
from docs.builder.blocks import blocks_of
from docs.builder.docstrings import with_code_blocks
from docs.builder.figures import NAMES, make, scores, structure
from earmill import formats, ray, sources, testing
from tests.docs.page_code import commands_of

ROOT = Path(__file__).resolve().parents[2]
HELD = {"docs/cost.md": "cost.md", "infra/README.md": "infra.md"}


def rewritten(text: str, *, origin: str = "docs/how/a.md", page: str = "how/a.md") -> str:
    return hooks.linked(text, origin=origin, page=page, held=HELD)


def test_links_go_where_the_site_has_the_file() -> None:
    assert rewritten("[a](../cost.md#the-sum)") == "[a](../cost.md#the-sum)"
    assert rewritten("[a](../../infra/README.md)") == "[a](../infra.md)"
    borrowed = rewritten("[a](../docs/cost.md)", origin="infra/README.md", page="infra.md")
    assert borrowed == "[a](cost.md)"
    assert rewritten("[a](https://example.org) [b](#c)") == "[a](https://example.org) [b](#c)"


def test_of_a_source_file_the_text_stays_and_what_is_nowhere_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert rewritten("[`kernels`](../../amtcore/kernels)") == "`kernels`"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        rewritten("[a](../nowhere.md)")
    assert "docs/how/a.md links to ../nowhere.md" in caplog.text


def test_links_in_code_are_left_alone() -> None:
    text = "```python\nx = y[0](../../infra/README.md)\n```\n"
    assert rewritten(text) == text


def test_tables_of_results() -> None:
    results = "# R\n\n## Speed\n\n`run` on it\n\n| m | v |\n| --- | --- |\n| A | 1 |\n| B | 2 |\n"
    assert hooks.table(results, "Speed", "B") == (
        "| m | v |\n| --- | --- |\n| B | 2 |\n\n`run` on it"
    )
    for asked in (("Speed", "C"), ("Weight",)):
        with pytest.raises(ValueError, match="expected"):
            hooks.table(results, *asked)


def test_tables_of_results_below_each_other_stay_tables() -> None:
    asked = "<!-- results: Exactness | Dau1997 -->\n<!-- results: Exactness | Sharpness -->"
    paragraphs = hooks._ASKED.sub(hooks._made, asked).split("\n\n")
    assert [text[0] for text in paragraphs] == ["|", "`", "|", "`"]


def test_columns_of_a_table_of_results() -> None:
    results = "## S\n\nx\n\n| m | v, w | z |\n| --- | --- | --- |\n| A | 1 | 2 |\n| B | 3 | 4 |\n"
    made = hooks.table(results, "S", "B", "m; v, w = speed")
    assert made == "| m | speed |\n| --- | --- |\n| B | 3 |\n\nx"
    asked = hooks._ASKED.fullmatch("<!-- results: S | |\n  m; v, w = speed -->")
    assert asked is not None and asked.groups()[1:] == ("S", "", "m; v, w = speed")
    with pytest.raises(ValueError, match=r"expected columns \['y'\]"):
        hooks.table(results, "S", None, "m; y")


def test_targets_of_measurements_are_not_shown() -> None:
    rows = "| m | wanted | v |\n| --- | --- | --- |\n| A (wanted: 1) | 2 | 3 |\n"
    text = f"A. Wanted: below 6 s. B.\n\n{rows}"
    made = hooks.without_targets(text)
    assert made == "A. B.\n\n| m | v |\n| --- | --- |\n| A | 3 |\n"
    other = "| m | v |\n| --- | --- |\n| A \\| B | 1 |\n"
    assert hooks.without_targets(other) == other


def test_pictures_have_captions() -> None:
    made = hooks.with_pictures('<p><img alt="A &lt; B" src="a.png" /></p>')
    assert made == (
        '<figure class="picture"><img alt="" src="a.png"><figcaption>A &lt; B</figcaption></figure>'
    )
    inline = '<p>see <img alt="A" src="a.png" /></p>'
    assert hooks.with_pictures(inline) == inline


def test_long_code_in_a_cell_may_break_after_marks() -> None:
    cell = "<td><code>max_mfc=150.0, .max_mfc</code> <code>a_b</code></td>"
    made = hooks.with_breaks(f"<code>max_mfc=150.0, .max_mfc</code>{cell}")
    assert made.startswith("<code>max_mfc=150.0, .max_mfc</code>")
    broken = "max_<wbr>mfc=<wbr>150.0, .max_<wbr>mfc"
    assert made.endswith(f"<td><code>{broken}</code> <code>a_b</code></td>")


def test_only_the_first_table_of_a_section() -> None:
    results = "## S\n\nx\n\n| a |\n| - |\n| 1 |\n\n| b |\n| - |\n| 2 |\n"
    assert hooks.table(results, "S") == "| a |\n| - |\n| 1 |\n\nx"


def test_every_section_of_results_is_cited_by_a_page() -> None:
    """A benchmark that no page cites is work at every measurement and nobody's answer."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    pages = "\n".join(file.read_text() for file in files)
    sections = re.findall(r"(?m)^## (.*)\n\n`(python -m [\w.]+)", hooks.RESULTS.read_text())
    assert len(sections) > 20
    for title, command in sections:
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        cited = rf"RESULTS\.md#{anchor}\)|<!-- results: {re.escape(title)} (\||-->)|{command}\b"
        assert re.search(cited, pages), f"no page shows, links or names {title} ({command})"


def test_formulas_become_mathml() -> None:
    page = r'<p>a <span class="arithmatex">\(x &lt; y\)</span></p>'
    made = hooks.with_formulas(page)
    assert "<math" in made and "&#x0003C;" in made and "arithmatex" not in made
    block = hooks.with_formulas(r'<div class="arithmatex">\[\frac{a}{b}\]</div>')
    assert "<mfrac>" in block and 'display="block"' in block


def test_every_command_is_in_the_reference() -> None:
    page = hooks.commands()
    for command in ("extract", "plan", "verify", "gc", "add-features"):
        assert f"## `earmill {command}`\n" in page
    assert (
        "`--resume`" in page
        and "`--set A.B=C`" in page
        and "`--where" not in page.replace("`--where-m", "")
    )


def exported(module: ModuleType) -> set[str]:
    """The names that a module lists, or else all its public names."""
    public = [name for name in vars(module) if not name.startswith("_")]
    return set(getattr(module, "__all__", public))


def test_every_exported_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r"^::: (\S+)$", text, re.M))
    # Modules have pages of their own; aliases of types have no docstring.
    without = {"events", "formats", "models", "ray", "sources", "stages", "testing", "__version__"}
    without |= {"Fetched", "Options"}
    wanted = {
        f"{module.__name__}.{name}"
        for module in (earmill, amtcore, sources, formats, testing, ray)
        for name in exported(module) - without
    }
    assert named - {"earmill.pipeline.driver.events"} == wanted


def test_examples_of_docstrings_become_code() -> None:
    text = "What.\n\n>>> f(1)\n2\n\nExample:\n    g(\n        3)\n"
    made = with_code_blocks(text)
    assert "```python\n>>> f(1)\n2\n```" in made and "```python\ng(\n    3)\n```" in made


def test_sections_of_docstrings_are_set_apart() -> None:
    made = with_code_blocks("What.\n\nArgs:\n    a: A.\nReturns:\n    B.\n")
    assert "A.\n\nReturns:\n" in made


def test_files_of_other_folders_are_published() -> None:
    files = hooks.borrowed()
    assert {"files/infra/slurm.sh", "files/jobs/folder.yaml", "infra.md"} <= set(files.values())


@pytest.mark.parametrize("name", ["layers", "rooms", "model_rooms", "kernel_rooms"])
def test_the_structure_is_that_of_the_contracts(name: str) -> None:
    contract = {
        "layers": "from the calls down to the models",
        "rooms": "rooms of the pipeline",
        "model_rooms": "rooms of the models",
        "kernel_rooms": "rooms of the kernels",
    }[name]
    drawn = make(name)
    for row in structure.contracts()[contract]:
        for module in row:
            assert f">{module.rpartition('.')[2]}</text>" in drawn
            assert 0 < len(structure.purpose(module)) < 80, module


def test_blocks_and_commands_of_a_page() -> None:
    code = "earmill plan a.yaml \\\n  --json | jq . # why"
    page = f"---\nrun: quick\n---\n\n```bash\n{code}\n```\n\n`earmill gc U`\n"
    assert [block.language for block in blocks_of(page)] == ["bash"]
    assert list(commands_of(page)) == [
        ["earmill", "plan", "a.yaml", "--json"],
        ["jq", "."],
        ["earmill", "gc", "U"],
    ]


@pytest.mark.parametrize("page", notebooks.pages(), ids=lambda page: page.stem)
def test_notebooks_are_those_of_the_pages(page: Path) -> None:
    kept = notebooks.notebook_file(page).read_text()
    assert kept == notebooks.notebook(page.read_text()), "run: python -m docs.builder.notebooks"
    kinds = [cell["cell_type"] for cell in json.loads(kept)["cells"]]
    assert kinds.count("code") > 5 and "markdown" in kinds


def test_the_drawing_of_scores_has_the_numbers_of_its_page() -> None:
    printed = scores.printed_scores()
    assert list(printed) == ["SRMR", "STOI"]
    for rooms, by_noise in printed.values():
        assert rooms == ["none", "0.2", "0.4", "0.8", "1.6"]
        assert list(by_noise) == ["clean", "20dB", "15dB", "10dB", "5dB", "0dB", "-5dB"]
        assert {len(line) for line in by_noise.values()} == {5}
    assert printed["SRMR"][1]["5dB"][-1] == 1.5 and printed["STOI"][1]["clean"][0] == 1.0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_figure_is_drawn_by_itself(name: str) -> None:
    svg = make(name)
    assert svg.startswith("<svg") and "\n" not in svg and "#010203" not in svg
    assert "<style" not in svg and "http://www.w3.org" in svg


def test_every_figure_is_on_a_page_and_described() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for name in NAMES:
        assert f"](figure:{name})" in pages
