"""`layerjump families`: list the architectures of transformers and how far each is supported."""

from __future__ import annotations

from collections import Counter

from layerjump.cli._options import JSON
from layerjump.cli._printing import print_table


def families(as_json: bool = JSON) -> None:
    """List the architectures of transformers and how far each is supported.

    [bold]layerjump families[/]
    [bold]layerjump families --json[/]
    """
    from layerjump.models.support_table import read_table

    rows = read_table()
    counts = Counter(row.degree for row in rows)
    title = f"{len(rows)} architectures: {', '.join(f'{counts[degree]} {degree}' for degree in sorted(counts))}"
    print_table(title, [vars(row) for row in rows], as_json=as_json)
