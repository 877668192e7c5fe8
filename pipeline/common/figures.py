"""Figures for people: as many digits as say something, and no exponent."""

from __future__ import annotations

# Smaller ones are only called small.
LEAST = 0.01


def figure(value: float) -> str:
    """Return a rate or a factor: 1,234, 123, 12.3, 1.2, 0.05."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.1f}"
    if size >= LEAST:
        return f"{value:.2f}"
    return f"less than {LEAST}" if size else "0"


def quantity(n: int, noun: str) -> str:
    """Return a number of things: 1 row, 1,234 rows."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time that has passed or is left: under 1 s, 42 s, 12.5 min, 3.2 h, 4.5 d."""
    if seconds < 1:
        return "under 1 s"
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds < most * size:
            return f"{seconds:.0f} s" if size == 1 else f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:,.1f} d"


def audio(seconds: float) -> str:
    """Return seconds of audio as people say them: 42 s, 12.5 min, 3.20 h, 1,234 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def bytes_text(n: float) -> str:
    """Return bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
