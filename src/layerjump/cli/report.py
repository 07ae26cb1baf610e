"""`layerjump report`: the page of a study written again, or several studies on one page."""

from __future__ import annotations

from pathlib import Path

import typer

from layerjump.cli._options import output_folder
from layerjump.cli._output_folder import locks_output
from layerjump.cli._printing import log


@locks_output("run the same command again")
def report(
    results: list[Path] = typer.Argument(help="Folders that `layerjump study` wrote."),
    output: Path = output_folder("report"),
) -> None:
    """Write the report of a study again, or compare several studies on one page.

    [bold]layerjump report study -o study[/]             the page of one study, written again
    [bold]layerjump report smollm2 stories -o both[/]    two studies compared
    """
    from layerjump.report.write_report import write_comparison, write_report
    from layerjump.studies.runner import load_results

    loaded = [load_results(path) for path in results]
    paths = write_report(loaded[0], output) if len(loaded) == 1 else write_comparison(loaded, output)
    log("\n".join(f"wrote {path}" for path in paths))
