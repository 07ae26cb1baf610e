"""`layerjump merge`: put the results of several runs into one folder."""

from __future__ import annotations

from pathlib import Path

import typer

from layerjump.cli._options import FORCE, JSON, output_folder
from layerjump.cli._output_folder import JUMPS, locks_output
from layerjump.cli._printing import log, print_table
from layerjump.cli.inspect import print_jumps
from layerjump.errors import BadArtifact

MOMENTS = "moments.safetensors"


@locks_output("nothing was written: run the same command to start again", refuses=JUMPS | {MOMENTS: "moments already"})
def merge(
    paths: list[Path] = typer.Argument(
        help="Jumps folders of one model, text and estimator; or moments files of one model."
    ),
    output: Path = output_folder("jumps"),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Join the jumps folders of a fit that was split over several runs, or add up moments files.

    [bold]layerjump merge early late -o jumps[/]   after `fit --pairs 0:30,1:30 -o early` and `fit --pairs 2:30 -o late`
    [bold]layerjump merge */moments.safetensors -o all[/]   one moments file, which `fit --from-moments` solves
    """
    if all(path.is_file() for path in paths):
        _merge_moments(paths, output, as_json=as_json)
    else:
        _merge_jumps(paths, output, as_json=as_json)


def _merge_moments(files: list[Path], output: Path, *, as_json: bool) -> None:
    from layerjump.jumps.moments_of_splits import merge_moments_files

    path = output / MOMENTS
    merged = merge_moments_files(files)
    merged.save(path)
    rows = [{"split": name, "positions": moments.n} for name, moments in merged.splits.items()]
    print_table(f"{merged.info.model}, {merged.info.text}", rows, as_json=as_json)
    log(f"wrote {path}; solve it with layerjump fit --from-moments {path}")


def _merge_jumps(folders: list[Path], output: Path, *, as_json: bool) -> None:
    from layerjump.jumps.jumps import Jumps

    for folder in folders:
        if not folder.is_dir():
            raise BadArtifact(
                f"expected folders of jumps, or moments files alone, got {folder}; give folders that `layerjump fit` "
                f"wrote"
            )
    jumps = Jumps.join([Jumps.from_pretrained(folder) for folder in folders])
    jumps.save_pretrained(output)
    print_jumps(jumps, as_json=as_json)
    log(f"wrote {output}")
