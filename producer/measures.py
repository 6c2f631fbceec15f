"""Sizes and times as people say them."""

from __future__ import annotations


def size(count: float) -> str:
    """Return a number of bytes in powers of 1,000: `999 B`, `1.5 kB`, `34.0 TB`."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} TB"


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which there are two: `3.2 s`, `12 s`, `3.5 min`, `7.2 h`, `2.1 days`."""
    for length_s, unit in ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
