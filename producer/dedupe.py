"""Which prompts of one pass count as repeated."""

from __future__ import annotations

import enum


class Dedupe(enum.StrEnum):
    """The words of `--dedupe`."""

    EXACT = "exact"
    """The same prompt under the same own id, or under none."""
    NEAR = "near"
    """Also one that is nearly the same, whatever its id."""
    NONE = "none"
    """None: a repeated prompt is asked again, as one more sample."""
