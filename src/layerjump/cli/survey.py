"""`layerjump survey`: what every level reads over a whole text."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from layerjump.cli._options import (
    ALLOW_OTHER_WEIGHTS,
    COLUMN,
    FORCE,
    JUMPS,
    LENS,
    MODEL,
    TEXT,
    LoadModel,
    loads_model,
    output_folder,
    text_option,
)
from layerjump.cli._output_folder import locks_output
from layerjump.cli._printing import log, print_table, progress_bar
from layerjump.cli.lens import make_lens

TABLE, PAGE = "survey.parquet", "report.html"


@locks_output("run the same command again", refuses={TABLE: "a survey already"})
@loads_model
def survey(
    model: str = MODEL,
    lens: str | None = LENS,
    jumps: Path | None = JUMPS,
    text: str = TEXT,
    column: str | None = COLUMN,
    tokens: int | None = text_option(None, "Number of tokens to read at most (default: the whole text)."),
    max_length: int = text_option(512, "Longest sequence; longer documents are cut."),
    seed: int = text_option(0, "Seed of the masked positions of a masked model."),
    output: Path = output_folder("survey"),
    force: bool = FORCE,
    allow_other_weights: bool = ALLOW_OTHER_WEIGHTS,
    *,
    load: LoadModel,
) -> None:
    """Tabulate what a lens reads over a whole text: survey.parquet, and report.html to look at it.

    The table has a row for each document, class of token (first, word, continuation, number, punctuation …) and
    level: the tokens that are read most, decided predictions, entropy, agreement with the model, surprisal.

    [bold]layerjump survey smollm2 --tokens 5000[/]                           the built-in text, the cached lens mat
    [bold]layerjump survey MODEL --jumps jumps --text notes.txt -o survey[/]  fitted jumps, a file
    [bold]layerjump survey MODEL --lens identity --text owner/dataset --column text[/]
    """
    from layerjump.data.corpus import load_text
    from layerjump.data.token_text import escape_token
    from layerjump.io import write_text
    from layerjump.lens.survey import ALL
    from layerjump.lens.survey import survey as survey_text
    from layerjump.report.write_report import survey_page

    corpus = load_text(text, column=column)
    loaded = load(model)
    reading = make_lens(loaded, lens, jumps, allow_other_weights)
    with progress_bar("surveying", "documents") as update:
        surveyed = survey_text(
            loaded,
            reading.jumps,
            corpus,
            output=output / TABLE,
            tokens=tokens,
            max_length=max_length,
            seed=seed,
            progress=update,
        )
    write_text(output / PAGE, survey_page(surveyed, shlex.join(["layerjump", *sys.argv[1:]])))
    log(f"wrote {output / TABLE}\nwrote {output / PAGE}")
    frame = surveyed.by_level()
    rows = [
        {
            "level": row.level,
            "decided": row.decided,
            "agreement": row.agreement,
            "entropy": row.entropy,
            "surprisal": None if row.surprisal != row.surprisal else row.surprisal,
            "read most": " ".join(f"{escape_token(t)} {p:.0%}" for t, p in surveyed.most_read(row.level, n=4)),
        }
        for row in frame[frame["token_class"] == ALL].itertuples()
    ]
    print_table(str(surveyed), rows)
