"""Foreign texts on a person's screen: harmless, and no longer than they are worth."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

SHOWN_CHARS = 2000
"""A text is cut here on the screen, in its middle."""


def harmless(text: str) -> str:
    r"""Return a text with everything that could steer a terminal written as \uXXXX; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\u{ord(char):04x}" for char in text)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: `1 sample`, `1,200 samples`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def subject(n: int, noun: str) -> str:
    """Return a number with its noun and verb, to begin a sentence: `1 sample is`, `1,200 samples are`."""
    return f"{counted(n, noun)} {'is' if n == 1 else 'are'}"


def cut(text: str, chars: int | None = SHOWN_CHARS) -> str:
    """Return a harmless text of about so many characters, its middle left out where it is longer; None: all of it."""
    if chars is not None and len(text) > chars:
        half = chars // 2
        text = f"{text[:half]}\n ... {len(text) - 2 * half:,} characters more ...\n{text[-half:]}"
    return harmless(text)


def one_line(text: str, chars: int) -> str:
    """Return the harmless beginning of a text on one line."""
    words = " ".join(text[: 4 * chars].split())
    return harmless(words if len(words) <= chars and len(text) <= 4 * chars else f"{words[: chars - 4]} ...")


def table(rows: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> Iterator[str]:
    """Yield rows as harmless lines with aligned columns, those in `left` to the left and the others to the right."""
    shown = [tuple(map(harmless, row)) for row in rows]
    wide = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = zip(row, wide, strict=True)
        yield "  ".join(f"{cell:<{w}}" if n in left else f"{cell:>{w}}" for n, (cell, w) in enumerate(cells)).rstrip()
