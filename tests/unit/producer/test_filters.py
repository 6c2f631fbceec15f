"""Filters: a condition means what its documentation says, and what is none is refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import UsageError
from producer.filters import parse

ROW: dict[str, Any] = {
    "lang": "python",
    "score": 0.9,
    "text_score": "0.95",
    "stars": 12,
    "ok": True,
    "nothing": None,
    "tags": ["math", "easy"],
    "meta": {"source": {"name": "a.b"}, "n": 3},
    "a.b": "dotted",
    "none": "nan",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("lang=python", True),
        ("lang == python", True),
        (" lang = python ", True),
        ("lang=Python", False),
        ("lang!=rust", True),
        ("lang!=python", False),
        ("lang~^py", True),
        ("lang~(?i)^PY.*N$", True),
        ("lang!~th", False),
        ("score>=0.9", True),
        ("score>0.9", False),
        ("score<1", True),
        ("score=0.9", True),
        ("score=0.90", True),
        ("text_score>=0.95", True),
        ("text_score<0.5", False),
        ("lang>1", False),
        ("none>0", False),
        ("stars=12", True),
        ("stars=12.0", True),
        ("stars~^1", True),
        ("stars<=11", False),
        ("ok=true", True),
        ("ok=false", False),
        ("ok>0", False),
        ("nothing=null", True),
        ("nothing!=null", False),
        ("missing=null", True),
        ("missing=x", False),
        ("missing!=x", True),
        ("missing>0", False),
        ("missing~.", False),
        ("tags=easy", True),
        ("tags=hard", False),
        ("tags!=hard", True),
        ("tags!=easy", False),
        ("tags~^ma", True),
        ("meta.source.name=a.b", True),
        ("meta.n>2", True),
        ("meta.x=null", True),
        ("meta=x", False),
        ("a.b=dotted", True),
        ("lang=a=b", False),
        ("lang=", False),
    ],
)
def test_what_holds(text: str, holds: bool) -> None:
    """Texts, numbers, truth, null, lists and fields inside compare as documented."""
    assert parse(text).holds(ROW) is holds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lang", "write it as COLUMN=VALUE"),
        ("", "write it as COLUMN=VALUE"),
        ("=x", "write it as COLUMN=VALUE"),
        ("lang~(", "holds no regular expression"),
        ("score>high", "compares with 'high', which is no number"),
        ("__import__('os').system('x')", "write it as COLUMN=VALUE"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, words: str) -> None:
    """A condition that cannot be understood is one sentence that says how to write it."""
    with pytest.raises(UsageError, match=words.replace("(", r"\(")) as caught:
        parse(text)
    assert str(caught.value).endswith(".")
