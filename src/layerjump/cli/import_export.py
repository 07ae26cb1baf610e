"""`layerjump import` and `layerjump export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from layerjump.cli._options import AsJson, Device, DeviceMap, Dtype, Force, Revision, Trust
from layerjump.cli._output_dir import JUMPS, writes_folder
from layerjump.cli.inspect import print_jumps

GivenModel = Annotated[
    str,
    typer.Option(
        "--model", help="The model of the lens: a hub id, a folder, a GGUF file, `smollm2`."
    ),
]


@writes_folder(lambda given: "run the same command again", holds=JUMPS)
def import_lens(
    source: Annotated[Path, typer.Argument(help="A lens of another tool: its file or folder.")],
    model: GivenModel,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of jumps to write.")],
    format: Annotated[
        str | None, typer.Option(help="tuned-lens, mat, jacobian (default: told by the files).")
    ] = None,
    force: Force = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Make a lens of another tool into a folder of jumps, which every command takes.

    Nothing in the files is run. Sizes are compared with the model's; that the lens was fitted on just these weights is
    for you to know.

    [bold]layerjump import lens/gpt2 --model gpt2 -o jumps[/]                  a tuned lens: config.json and params.pt
    [bold]layerjump import linreg/gpt2/wikipedia --model gpt2 -o jumps[/]      the mat paper's matrices: 0_12.pickle …
    [bold]layerjump import gpt2_jacobian_lens.pt --model gpt2 -o jumps[/]      a Jacobian lens
    """
    from layerjump.jumps.convert.convert import import_lens as read_lens
    from layerjump.models.loading import load

    loaded = load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    jumps = read_lens(source, loaded, format=format)
    jumps.save_pretrained(output)
    print_jumps(jumps, as_json=as_json, structure=True)
    print(f"wrote {output}", file=sys.stderr)


@writes_folder(lambda given: "run the same command again", replaced=True)
def export_lens(
    jumps: Annotated[Path, typer.Argument(help="A folder of jumps.")],
    model: GivenModel,
    format: Annotated[str, typer.Option(help="tuned-lens, mat or jacobian.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder (jacobian: file) to write.")
    ],
    force: Force = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write a folder of jumps as a lens of another tool.

    A tuned lens has a map from every level to the last; mat from any level to any later one; a Jacobian lens from
    levels 1, 2, … to the last, without biases. Jumps that have no place are left out, and said so.

    [bold]layerjump export jumps --model gpt2 --format tuned-lens -o lens/gpt2[/]
    [bold]layerjump export jumps --model gpt2 --format mat -o linreg/gpt2[/]
    [bold]layerjump export jumps --model gpt2 --format jacobian -o lens.pt[/]
    """
    from layerjump.io import check_free
    from layerjump.jumps.convert.convert import export_lens as write_lens
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.loading import load

    check_free(output, force=force)
    loaded = load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    write_lens(Jumps.from_pretrained(jumps, model=loaded), loaded, output, format)
    print(f"wrote {output}", file=sys.stderr)
