"""Licences of audio and features: checked, stored, in every card; stated later; never guessed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

import earmill
from earmill.pipeline.common.errors import OutputError, SpecError
from earmill.pipeline.dataset.card import readme
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.description import DatasetFile, read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.revision import restate_licenses
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.licenses import HUB_ALONE, HUB_AS_SPDX, HUB_OF_SPDX, License
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.again_jobs import (
    Job,
    _corpus_as_it_was,  # noqa: F401
    corpus_made,  # noqa: F401
    finished_job,  # noqa: F401
    run_here,  # noqa: F401
)
from tests.pipeline.outputs import dataset_file, small_dataset

OTHER = {"id": "other", "name": "LDC User Agreement", "link": "https://example.org/ldc"}


def job(**licenses: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": "speech"},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": "features"},
            "licenses": licenses,
        }
    )


@pytest.mark.parametrize(
    ("said", "header", "url"),
    [
        ("cc-by-4.0", {"license": "cc-by-4.0"}, "https://spdx.org/licenses/CC-BY-4.0.html"),
        ("ODC-By-1.0", {"license": "odc-by"}, "https://spdx.org/licenses/ODC-By-1.0.html"),
        ("odc-by", {"license": "odc-by"}, None),
        ("unknown", {"license": "unknown"}, None),
        (
            "CC-BY-NC-SA-2.5",
            {
                "license": "other",
                "license_name": "cc-by-nc-sa-2.5",
                "license_link": "https://spdx.org/licenses/CC-BY-NC-SA-2.5.html",
            },
            "https://spdx.org/licenses/CC-BY-NC-SA-2.5.html",
        ),
        (
            "mit or apache-2.0",
            {"license": "other", "license_name": "mit-or-apache-2.0"},
            None,
        ),
        (
            OTHER,
            {
                "license": "other",
                "license_name": "ldc-user-agreement",
                "license_link": "https://example.org/ldc",
            },
            "https://example.org/ldc",
        ),
    ],
)
def test_a_licence_is_what_the_hub_and_spdx_call_it(
    said: Any, header: dict[str, str], url: str | None
) -> None:
    stated = job(features=said).licenses.features
    assert stated is not None
    assert (stated.front_matter(), stated.url) == (header, url)


@pytest.mark.parametrize("word", sorted({*HUB_AS_SPDX, *HUB_ALONE, *HUB_OF_SPDX}))
def test_every_id_of_the_table_is_accepted_and_stays_one_of_the_hub(word: str) -> None:
    header = License(id=word).front_matter()
    assert header == {"license": HUB_OF_SPDX.get(word, word)}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CC-BY", "licenses.source.id: expected an SPDX id such as CC-BY-4.0"),
        ("cc-by-4", "did you mean 'cc-by-4.0'?"),
        ("other", "licenses.source: expected a name with the licence other"),
        ({"id": "other", "name": " "}, "expected a name with the licence other"),
        ({"id": "mit", "link": "javascript:alert(1)"}, "expected an http(s) address"),
        ({"id": "mit", "link": "https://me:pw@host/x"}, "credentials inside a URI"),
        ({"id": "mit", "url": "https://host"}, "unknown key"),
        (3, "licenses.source"),
    ],
)
def test_what_is_no_licence_is_refused_in_one_line(said: Any, told: str) -> None:
    with pytest.raises(SpecError, match=r"licenses\.source") as caught:
        job(source=said)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert "pw" not in str(caught.value)


def test_licences_decide_no_feature() -> None:
    assert job(source="mit", features=OTHER).sha256() == job().sha256()


def test_a_description_without_licences_is_written_as_before_and_one_with_them_read_back() -> None:
    assert "licenses" not in json.loads(dataset_file().to_json())
    stated = dataset_file(licenses={"features": {"id": "MIT"}})
    assert DatasetFile.from_json(stated.to_json()) == stated
    with pytest.raises(OutputError, match="not readable"):
        DatasetFile.from_json(replace(stated, licenses={"source": {"name": "x"}}).to_json())


def card_of(layout: Layout) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Header and text of the card, and Croissant."""
    text = layout.read_bytes("README.md").decode()
    return (
        yaml.safe_load(text.split("---")[1]),
        text,
        json.loads(layout.read_bytes("croissant.json")),
    )


def test_where_nothing_is_stated_the_cards_say_so(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    header, text, machine = card_of(layout)
    assert not any(key.startswith("license") for key in header)
    assert "| features | not stated |  |\n| source audio | not stated |  |" in text
    assert machine["license"]["name"] == "not stated"
    assert machine["prov:wasDerivedFrom"]["license"]["name"] == "not stated"


def test_names_with_markup_stay_names(tmp_path: Path) -> None:
    licenses = {"features": {"id": "other", "name": 'a | b\n---\n"x": [y](z) <i>'}}
    dataset = dataset_file(licenses=licenses)
    index = pa.table({"stage": pa.nulls(1, pa.string()), "error_class": pa.nulls(1, pa.string())})
    records = list(commits(small_dataset(tmp_path)).values())
    text = readme(dataset, records, index, OutFile("index/x", 1, "0" * 64))
    assert yaml.safe_load(text.split("---")[1])["license_name"] == "a-b-x-y-z-i"
    assert "<i>" not in text and "\n| features | a \\| b" in text


def test_they_are_stated_with_the_job_and_changed_with_resume(job: Job, go: Any) -> None:
    """Nothing is computed for it, old snapshots stay, and what is not said again stays."""
    assert read_dataset(job.layout).licenses == {}  # type: ignore[union-attr]
    files = sorted(job.layout.list("data"))
    spec = job.spec.model_copy(update={"licenses": job_licenses(source="cc-by-4.0")})
    go(spec)
    go(job.spec)  # which states none
    header, text, machine = card_of(job.layout)
    assert "license" not in header and "| source audio | CC-BY-4.0 | https://spdx.org" in text
    assert machine["prov:wasDerivedFrom"]["license"] == "https://spdx.org/licenses/CC-BY-4.0.html"
    go(job.spec.model_copy(update={"licenses": job_licenses(features=OTHER)}))
    header, text, machine = card_of(job.layout)
    assert header["license_name"] == "ldc-user-agreement"
    assert "| source audio | CC-BY-4.0 |" in text and "| features | LDC User Agreement |" in text
    assert machine["license"] == {
        "@type": "sc:CreativeWork",
        "name": OTHER["name"],
        "url": OTHER["link"],
    }
    assert [entry.why for entry in earmill.log(job.out)] == ["extract", "licences", "licences"]
    assert sorted(job.layout.list("data")) == files
    assert verify(job.layout).problems == []
    assert len(earmill.open_features(job.out, snapshot=1)) == 2


def job_licenses(**said: Any) -> Any:
    return job(**said).licenses


def test_a_restatement_that_was_cut_off_is_finished(
    job: Job, go: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(layout: Layout, **_: Any) -> None:
        raise KeyboardInterrupt

    wanted = job_licenses(features="mit").to_dict()
    with monkeypatch.context() as patch:
        patch.setattr("earmill.pipeline.dataset.revision.finalise", killed)
        with pytest.raises(KeyboardInterrupt):
            restate_licenses(job.layout, wanted)
    assert "license" not in card_of(job.layout)[0]
    go(job.spec)
    assert card_of(job.layout)[0]["license"] == "mit"
    assert verify(job.layout).problems == []
