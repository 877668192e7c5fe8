"""Licences of the audio and of the features, in the ids of the hub, Croissant and SPDX.

A licence is an SPDX id or expression, in any case (`CC-BY-4.0`), an id that only the Hugging Face
hub has (`odc-by`, `openrail`), `unknown`, or `other` with a name of its own. Licences only appear
in cards, so they are not in the job's hash, and may be stated or changed later. Sources of the ids:
the hub's documentation, "Licenses", and the packaging library for SPDX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from pydantic import AfterValidator, BeforeValidator, field_validator, model_validator

from earmill.pipeline.common.text import nearest, one_line
from earmill.pipeline.spec import SpecModel, plain_uri

OTHER = "other"
# Ids of card headers on the hub that are SPDX ids in lower case.
HUB_AS_SPDX = frozenset(
    "afl-3.0 apache-2.0 artistic-2.0 bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 "
    "cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 "
    "cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 "
    "cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0 "
    "agpl-3.0 ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gpl-2.0 gpl-3.0 isc lgpl-2.1 "
    "lgpl-3.0 lppl-1.3c mit mpl-2.0 ms-pl ncsa ofl-1.1 osl-3.0 postgresql unlicense wtfpl "
    "zlib".split()
)
# SPDX ids to the hub's own spelling.
HUB_OF_SPDX = {
    "odc-by-1.0": "odc-by",
    "odbl-1.0": "odbl",
    "pddl-1.0": "pddl",
    "c-uda-1.0": "c-uda",
    **{f"{name}-only": name for name in ("agpl-3.0", "gpl-2.0", "gpl-3.0", "lgpl-2.1", "lgpl-3.0")},
}
# Ids of the hub alone: families, and licences of models.
HUB_ALONE = frozenset(
    "bigcode-openrail-m bigscience-bloom-rail-1.0 bigscience-openrail-m bsd c-uda cc "
    "creativeml-openrail-m gfdl gpl lgpl lgpl-lr odbl odc-by openrail openrail++ pddl "
    "unknown".split()
)
_SPDX_PAGE = "https://spdx.org/licenses/{}.html"


class License(SpecModel):
    """One licence; plain text is its id.

    Args:
        id: An SPDX id or expression, an id of the hub, unknown, or other.
        name: Name of the licence; required with other.
        link: An http(s) address of its text.
    """

    id: str
    name: Annotated[str, AfterValidator(one_line)] | None = None
    link: str | None = None

    @field_validator("id")
    @classmethod
    def _known(cls, value: str) -> str:
        word = value.strip()
        if word.lower() == OTHER or word.lower() in HUB_ALONE:
            return word.lower()
        try:
            return str(canonicalize_license_expression(word))
        except InvalidLicenseExpression:
            hint = nearest(word.lower(), sorted({*HUB_AS_SPDX, *HUB_ALONE}))
            raise ValueError(
                f"expected an SPDX id such as CC-BY-4.0, an id of the Hugging Face hub, unknown, "
                f"or other with a name, got {one_line(value)!r}{hint}"
            ) from None

    @field_validator("link")
    @classmethod
    def _web_address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s]+", plain_uri(value)):
            raise ValueError(f"expected an http(s) address, got {one_line(value)!r}")
        return value

    @model_validator(mode="after")
    def _named(self) -> License:
        if self.id == OTHER and not (self.name or "").strip():
            raise ValueError(
                "expected a name with the licence other, e.g. {id: other, name: LDC User Agreement,"
                " link: https://...}"
            )
        return self

    @property
    def title(self) -> str:
        return self.name or self.id

    @property
    def url(self) -> str | None:
        """Address of its text: the link, else SPDX's page; None if there is neither."""
        if self.link is not None:
            return self.link
        simple = self.id != OTHER and self.id not in HUB_ALONE and " " not in self.id
        is_own = self.id.startswith("LicenseRef-")
        return _SPDX_PAGE.format(self.id) if simple and not is_own else None

    def front_matter(self) -> dict[str, str]:
        """Return the keys for the header of a card on the hub, which takes only ids of its list."""
        word = self.id.lower()
        if word in HUB_AS_SPDX or word in HUB_ALONE or word in HUB_OF_SPDX:
            return {"license": HUB_OF_SPDX.get(word, word)}
        # An identifier of the hub: `LDC User Agreement` is `ldc-user-agreement`.
        name = re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-") or OTHER
        keys = {"license": OTHER, "license_name": name}
        return keys | ({"license_link": self.url} if self.url else {})


Stated = Annotated[
    License | None,
    BeforeValidator(
        lambda value: {"id": value} if isinstance(value, str) else value,
        json_schema_input_type=License | str | None,
    ),
]


class LicensesSpec(SpecModel):
    """Licences of audio and features, for the cards; they do not change features.

    Args:
        source: Licence of the audio: its id, or a mapping. Cards say "not stated" when null.
        features: Licence of the features, in the same form. It does not follow from the licence of
            the audio. Both may be stated or changed later, with --resume.
    """

    source: Stated = None
    features: Stated = None

    def to_dict(self) -> dict[str, dict[str, str]]:
        return self.model_dump(exclude_none=True)


def stored_licenses(stored: Mapping[str, Mapping[str, str]]) -> LicensesSpec:
    """Return the licences of a dataset.json; KeyError if a licence has no id. Ids are not checked:
    another release may know them."""
    found = {
        key: License.model_construct(id=each["id"], name=each.get("name"), link=each.get("link"))
        for key, each in stored.items()
        if key in LicensesSpec.model_fields
    }
    return LicensesSpec.model_construct(source=found.get("source"), features=found.get("features"))
