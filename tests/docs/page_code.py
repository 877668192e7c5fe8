"""Code of the documentation's pages: the commands that they show, and their blocks, run.

YAML that begins with `# name.yaml` becomes that file. Shell blocks run with `bash -e`. Blocks of
Python share one namespace. A comment `<!-- check: accuracy > 0.9 -->` must then be true. A block
`text` is what the block before it has printed; `...` in it stands for anything. The head of a page
says whether it is run: `run: quick` by `make test`, `run: long` by `make test-long`,
`run: integrations` by `make integrations`.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.builder.blocks import FENCE, Block, blocks_of, meta_of

ROOT = Path(__file__).resolve().parents[2]
#: Languages of blocks that a shell reads; blocks without a language may hold commands as well.
SHELL = ("bash", "console", "sh", "")
_INDENTED = re.compile(r"(?m)^    (earmill .*(?:\\\n.*)*)$")
_INLINE = re.compile(r"`(earmill [^`]+)`")
_FILE = re.compile(r"\A# ([\w./-]+\.\w+)")
_SAME = doctest.OutputChecker()
_LAX = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class PageError(AssertionError):
    """A block of a page does not do what the page says."""


def pages(kind: str) -> list[Path]:
    """The pages whose head says `run: <kind>`."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if meta_of(page.read_text()).get("run") == kind]


def run(
    page: Path,
    *,
    names: Mapping[str, Any] | None = None,
    text: str | None = None,
    shell: Callable[[str, str], str] | None = None,
) -> int:
    """Run a page in the current folder; how many blocks have run.

    Args:
        names: What its Python finds already. text: Instead of the page's own.
        shell: Runs a shell block, given its text and place, and returns the printed text.
            None: `bash`.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", **(names or {})}
    printed, ran = "", 0
    for block in blocks_of(page.read_text() if text is None else text):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "text":
            _compare(where, block.text, printed)
            continue
        try:
            printed = _run_block(block, namespace, where, shell or run_shell)
            print(f"{where}\n{printed}" if printed else where)
        except PageError:
            raise
        except Exception as error:
            raise PageError(f"{where}: {type(error).__name__}: {error}") from error
        ran += block.language in ("python", "bash", "check", "yaml")
    return ran


def _run_block(
    block: Block, namespace: dict[str, Any], where: str, shell: Callable[[str, str], str]
) -> str:
    """Run one; what it printed."""
    if block.language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block.text, where, "exec", dont_inherit=True), namespace)
        return out.getvalue()
    if block.language == "bash":
        return shell(block.text, where)
    if block.language == "check":
        if not eval(block.text, namespace):
            raise PageError(f"{where}: not so: {block.text}")
    elif named := _FILE.match(block.text):
        Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(named[1]).write_text(block.text)
    return ""


def run_shell(text: str, where: str) -> str:
    """Run a shell block by `bash`, and return the printed text."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", text],
        env={**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        raise PageError(f"{where}: exit code {done.returncode} of\n{text}\n{said}")
    return done.stdout


def _compare(where: str, wanted: str, printed: str) -> None:
    if not _SAME.check_output(wanted, printed, _LAX):
        raise PageError(f"{where}: the page says\n{wanted}\nand it is\n{printed}")


def _write_clips(folder: str) -> None:
    """A few clips of noise."""
    import numpy as np
    import soundfile

    Path(folder).mkdir()
    for number in range(24):
        noise = np.random.default_rng(number).standard_normal(48000 + 1000 * number)
        soundfile.write(f"{folder}/{number}.wav", 0.05 * noise, 16000)


def run_hub() -> int:
    """The page on cards and the hub: a dataset where it says one is, and no hub."""
    import earmill

    _write_clips("corpus")
    earmill.extract(
        {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "melspectrogram"}],
            "output": {"uri": "features"},
            "run": {"executor": "local"},
        }
    )
    page = ROOT / "docs" / "hub.md"
    return run(page, text=page.read_text().replace('"me/speech"', '"features"'))


def run_readme() -> int:
    """The README's Python and its job: a small corpus in the place of its buckets."""
    import earmill

    _write_clips("corpus")
    text = (ROOT / "README.md").read_text().replace("s3://corpus/speech", "corpus")
    text = text.replace("s3://features/speech", "features")
    for block in blocks_of(text):
        if block.language == "yaml":
            _run_block(block, {}, "README.md", run_shell)
    earmill.extract("speech.yaml", overrides=["run.executor=local"])
    return run(ROOT / "README.md", text=text)


#: Pages that are not runnable as they are, and what runs them.
PREPARED = {"README.md": run_readme, "docs/hub.md": run_hub}


def run_named(name: str) -> None:
    """Run a page by its name in the repository, prepared where it needs that."""
    PREPARED[name]() if name in PREPARED else run(ROOT / name)


def commands_of(page: str) -> Iterator[list[str]]:
    """Every command line, as words: of shell blocks, indented ones, and `earmill ..` in text."""
    for block in blocks_of(page):
        if block.language in SHELL:
            yield from _lines(block.text, all_of_them=block.language != "")
    prose = FENCE.sub("", page)
    for match in [*_INDENTED.finditer(prose), *_INLINE.finditer(prose)]:
        yield from _words(" ".join(match[1].split()))


def _lines(text: str, *, all_of_them: bool) -> Iterator[list[str]]:
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1\b", "", text, flags=re.S)
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if all_of_them or re.match(r"(earmill|make) ", line):
            yield from _words(line)


def _words(line: str) -> Iterator[list[str]]:
    """The commands of a line, cut at pipes, redirections and `&&`; settings before one left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("();<>|&"):
            words.append(word)
        elif words:
            named = [i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)]
            if named:
                yield words[named[0] :]
            words = [] if word not in ("<", ">", ">>") else ["#"]
