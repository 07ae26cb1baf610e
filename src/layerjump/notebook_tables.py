"""HTML of objects in notebooks: tables whose cells are text, never markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def facts_table(caption: str, facts: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    rows = "".join(
        f'<tr><th style="text-align:left">{_text(name)}</th><td style="text-align:left">{_text(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table>{_caption(caption)}<tbody>{rows}</tbody></table>"


def rows_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; numbers have three decimals, and a number from 0 to 1 a bar behind it."""
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{_caption(caption)}<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _caption(text: str) -> str:
    return f'<caption style="text-align:left">{_text(text)}</caption>'


def _text(value: object) -> str:
    return escape(str(value), quote=True)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return f"<td>{_text(value)}</td>"
    share = 100 * value if 0 <= value <= 1 else 0
    bar = f"background:linear-gradient(to right, rgba(0,114,178,.3) {share:.0f}%, transparent {share:.0f}%)"
    return f'<td style="{bar}">{value:.3f}</td>'
