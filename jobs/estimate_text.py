"""Estimates in words: what a sample says of a job, and what a run was held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from earmill.pipeline.common.figures import bytes_text

# Smaller amounts are only called small.
LEAST = 0.0001
# Parts of the CPU time below this share are not worth a word.
LEAST_SHARE = 0.02
NAMED_KINDS = 6
NAMES = {
    "time_s": "time",
    "cpu_s": "CPU",
    "core_s": "cores held",
    "gpu_s": "GPU",
    "stored_bytes": "stored",
    "objects": "objects",
    "puts": "PUT, LIST",
    "gets": "GET, HEAD",
    "money": "money",
}


def amount(name: str, value: float, currency: str = "") -> str:
    """One figure as people say it: 42 s, 3.1 min, 2.5 h; 1.2 GB; 1,200; 0.031 EUR."""
    if name.endswith("_s"):
        return _duration(value)
    if name == "stored_bytes":
        return bytes_text(value)
    if name == "money":
        return f"{_digits(value)} {currency}".strip()
    return f"{value:,.0f}"


def range_text(name: str, value: Mapping[str, float], currency: str = "") -> str:
    """`42 s (38 s to 51 s)`."""
    low, middle, high = (amount(name, value[end], currency) for end in ("low", "expected", "high"))
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def sample_rows(sample: Mapping[str, Any]) -> dict[str, str]:
    """What a sample says, as rows of the table of `earmill plan`."""
    currency = (sample["prices"] or {}).get("currency", "")
    rows = {
        NAMES[name]: range_text(name, value, currency) for name, value in sample["figures"].items()
    }
    crew = sample["crew"]
    workers = "1 worker" if crew["workers"] == 1 else f"{crew['workers']:,} workers"
    rows["time"] += f" with {workers} of {crew['threads']} threads here, bound by "
    rows["time"] += sample["bound_by"]
    rows["CPU"] += f": {_parts(sample['cpu_parts'])}"
    rows["sample"] = _tried(sample)
    for name, (tried, of) in sample["tried"].items():
        rows[f"  {name}"] = f"{tried:,} of {of:,} rows"
    if sample["bad"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sample["bad"].items())
        share = sample["bad_share"]
        rows["bad rows"] = (
            f"{reasons}; expect {share['expected']:.1%} of all rows in quarantine "
            f"({share['low']:.1%} to {share['high']:.1%})"
        )
    if sample["gpu"]:
        rows["note "] = sample["gpu"]
    return rows


def against(estimate: Mapping[str, Mapping[str, float]], currency: str = "") -> dict[str, str]:
    """What was expected beside what it was, by name: `58 s (52 s to 66 s), was 61 s, +5 %`."""
    rows = {}
    for name, value in estimate.items():
        expected = value["expected"]
        differs = f", {value['actual'] / expected - 1:+.0%}" if expected else ""
        rows[NAMES[name]] = (
            f"{range_text(name, value, currency)}, was "
            f"{amount(name, value['actual'], currency)}{differs}"
        )
    return rows


def against_line(estimate: Mapping[str, Mapping[str, float]]) -> str | None:
    """The same in one line; None where nothing was estimated."""
    if not estimate:
        return None
    said = "; ".join(f"{name} {text}" for name, text in against(estimate).items())
    return f"estimate against actual: {said}"


def _tried(sample: Mapping[str, Any]) -> str:
    tried = sum(count for count, _ in sample["tried"].values())
    kinds = sample["kinds"][:NAMED_KINDS]
    more = len(sample["kinds"]) - len(kinds)
    named = ", ".join(kinds) + (f", {more} more kinds" if more else "")
    return f"{tried:,} rows in {sample['took_s']:.0f} s, seed {sample['seed']}: {named}"


def _parts(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values())
    shares = sorted(((seconds / whole, part) for part, seconds in parts.items()), reverse=True)
    return ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= LEAST_SHARE)


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size in (("s", 1.0), ("min", 60.0)):
        if seconds / size < 99:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 3600)} h"


def _digits(value: float) -> str:
    """Three digits that count; whole numbers above, and no exponent below."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= LEAST or not value else f"under {LEAST}"
