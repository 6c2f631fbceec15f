"""Tables of a page: numbers to the right, long words wrapped, everything escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence


class Words(str):
    """Text that may be long; its lines stay lines."""

    __slots__ = ()


Cell = str | int


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table that scrolls sideways where it is too wide."""
    numeric = [bool(rows) and all(isinstance(row[place], int) for row in rows) for place in range(len(heads))]
    head = "".join(
        f"<th{' class=n' if right else ''}>{html.escape(name)}</th>" for name, right in zip(heads, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Cell) -> str:
    if isinstance(value, int):
        return f'<td class="n">{value:,}</td>'
    if isinstance(value, Words):
        return f'<td class="words">{html.escape(value).replace(chr(10), "<br>")}</td>'
    return f"<td>{html.escape(value)}</td>"
