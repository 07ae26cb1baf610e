"""`layerjump import` and `layerjump export`: lenses of other tools, and models as GGUF files."""

from __future__ import annotations

from pathlib import Path

import typer

from layerjump.cli._options import FORCE, JSON, LoadModel, loads_model, option
from layerjump.cli._output_folder import JUMPS, locks_output
from layerjump.cli._printing import log
from layerjump.cli.inspect import print_jumps
from layerjump.errors import BadArtifact

LENS_MODEL: str = typer.Option(..., "--model", help="The lens's model: a hub id, a folder, a GGUF file, or `smollm2`.")


@locks_output("run the same command again", refuses=JUMPS)
@loads_model
def import_lens(
    source: Path = typer.Argument(help="File or folder of the lens."),
    model: str = LENS_MODEL,
    output: Path = typer.Option(..., "-o", "--output", metavar="<folder>", help="Folder of jumps to write."),
    format: str | None = option(None, "tuned-lens, mat or jacobian (default: detected)."),
    force: bool = FORCE,
    as_json: bool = JSON,
    *,
    load: LoadModel,
) -> None:
    """Convert a lens of another tool to a folder of jumps.

    No code in the files is executed. Only shapes are compared with the model: make sure that the lens was trained on
    these weights.

    [bold]layerjump import lens/gpt2 --model gpt2 -o jumps[/]                a tuned lens: config.json and params.pt
    [bold]layerjump import linreg/gpt2/wikipedia --model gpt2 -o jumps[/]    matrices of the mat paper: 0_12.pickle …
    [bold]layerjump import gpt2_jacobian_lens.pt --model gpt2 -o jumps[/]    a Jacobian lens
    """
    from layerjump.jumps.convert.import_export import import_lens as read_lens

    loaded = load(model)
    jumps = read_lens(source, loaded, format=format)
    jumps.save_pretrained(output)
    print_jumps(jumps, as_json=as_json, spectrum=True)
    log(f"wrote {output}")


@locks_output("run the same command again", is_replaced=True)
@loads_model
def export(
    source: str = typer.Argument(help="Folder of jumps; with --format gguf, a model."),
    model: str | None = option(None, "The model of the jumps: a hub id, a folder, a GGUF file, or `smollm2`."),
    format: str = typer.Option(help="tuned-lens, mat, jacobian or gguf."),
    output: Path = typer.Option(
        ..., "-o", "--output", metavar="<folder or file>", help="Folder (jacobian, gguf: file) to write."
    ),
    force: bool = FORCE,
    *,
    load: LoadModel,
) -> None:
    """Convert a folder of jumps to a lens of another tool, or a model to a GGUF file.

    A tuned lens holds a map from every level to the last; mat from any level to any later one; a Jacobian lens from
    levels 1, 2, … to the last, without biases. Jumps that the format cannot hold are skipped with a warning.
    A GGUF file holds a model of the Llama, Qwen or Gemma families, such as a pruned one; it is read back and compared.

    [bold]layerjump export jumps --model gpt2 --format tuned-lens -o lens/gpt2[/]
    [bold]layerjump export jumps --model gpt2 --format mat -o linreg/gpt2[/]
    [bold]layerjump export jumps --model gpt2 --format jacobian -o lens.pt[/]
    [bold]layerjump export smaller --format gguf -o smaller.gguf[/]    a model that `layerjump prune` wrote
    """
    from layerjump.io import check_free
    from layerjump.jumps.convert.import_export import export_lens as write_lens
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.write_gguf import write_gguf

    check_free(output, force=force)
    if format == "gguf":
        write_gguf(load(source), output)
    elif model is None:
        raise BadArtifact(f"--format {format} needs --model, the model of the jumps")
    else:
        loaded = load(model)
        write_lens(Jumps.from_pretrained(Path(source), model=loaded), loaded, output, format)
    log(f"wrote {output}")
