"""Write and load a pruned checkpoint.

The model card of a pruned checkpoint: what was done, on what text, and what it costs.

Write a pruned model, whole or not at all: an ordinary checkpoint, or base and jumps where no weight holds them.

Load any model, also one that `prune` saved as base and jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerjump import __version__
from layerjump.errors import BadArtifact, WrongModel
from layerjump.io import (
    read_json,
    replace_folder,
    write_json,
    write_text,
)
from layerjump.jumps.jumps import Jumps
from layerjump.models.fingerprint import fingerprint
from layerjump.models.loading import LINEAR, quiet_transformers
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.pruning.prune import Pruned
from layerjump.pruning.replace import METHODS, attach_maps
from layerjump.pruning.select import blocks_in_spans

TRUNCATED = "a jump to the state after the final norm, merged into an untied head"


def card(record: dict[str, Any]) -> str:
    """A README in the form the hub reads."""
    return "\n\n".join([_head(record), _done(record), _measured(record), _use(record)]) + "\n"


def _head(record: dict[str, Any]) -> str:
    left = record["blocks"] - len(record["dropped"])
    return (
        "---\nlibrary_name: transformers\ntags:\n- layerjump\n- pruned\n---\n\n"
        f"# {record['model']}, {left} of {record['blocks']} blocks"
    )


def _done(record: dict[str, Any]) -> str:
    method = record["method"]
    meaning = TRUNCATED if method == "truncate" else METHODS[method]
    before, after = (record["parameters"][name] for name in ("before", "after"))
    lines = [
        f"Made from `{record['model']}` (weights {record['fingerprint'][:12]}) by layerjump {record['layerjump']}.",
        f"- Blocks dropped, counted from 1: {', '.join(map(str, record['dropped']))} (chosen: {record['choice']}).",
        f"- In their place (`{method}`): {meaning}.",
        f"- Fitted in closed form on text `{record['text']}`: {record['tokens']:,} tokens in all, split "
        f"{record['split']}, seed {record['seed']}.",
        f"- Parameters: {before:,} before, {after:,} after.",
    ]
    if record["distilled"]:
        told = ", ".join(f"{name} {value}" for name, value in record["distilled"].items())
        lines.append(f"- Then distilled: {told}.")
    return "\n".join(lines)


def _measured(record: dict[str, Any]) -> str:
    loss = record["loss"]
    if not loss:
        return "Its loss was not measured."
    return (
        "| on test documents of that text | before | after |\n|---|---|---|\n"
        f"| loss, nats a token | {loss['before']:.4f} | {loss['after']:.4f} |\n"
        f"| perplexity | {loss['perplexity before']:.3f} | {loss['perplexity after']:.3f} |\n\n"
        f"Perplexity ratio {loss['ratio']:.3f} (95 % interval over documents {loss['low']:.3f} to "
        f"{loss['high']:.3f}), {loss['tokens']:,} tokens."
    )


def _use(record: dict[str, Any]) -> str:
    if record["method"] == "linear":
        return "The maps stand beside the checkpoint in `base/`, so load it with layerjump: `layerjump.load(folder)`."
    return (
        "An ordinary checkpoint: `AutoModelForCausalLM.from_pretrained(folder)` (encoders: "
        "`AutoModelForMaskedLM`) loads it, with no code of layerjump's."
    )


RECORD = "pruning.json"
"""What was done, for programs; README.md says it to people."""
BASE = "base"
"""The folder of the checkpoint that maps stand beside: a plain loader must not take it for the whole."""


def save(pruned: Pruned, folder: Path, *, force: bool = False) -> None:
    """Write a pruned model, its card and its record into a folder that does not exist yet (`force`: or does)."""
    replace_folder(folder.expanduser(), lambda place: _write(pruned, place), force=force)


def _write(pruned: Pruned, place: Path) -> None:
    record = make_record(pruned)
    if pruned.jumps is None:
        save_checkpoint(pruned.model, place)
    else:
        save_checkpoint(pruned.model, place / BASE)
        pruned.jumps.save_pretrained(place)
        head = {"kind": "layerjump linear model", "format": 1, "cuts": [*map(list, pruned.cuts)]}
        write_json(
            place / LINEAR, head | {"fingerprint": fingerprint(pruned.model.hf, attached=False)}
        )
    write_json(place / RECORD, record)
    write_text(place / "README.md", card(record))


def save_checkpoint(model: Model, folder: Path) -> None:
    """Weights, configuration, generation configuration and tokenizer, as Hugging Face saves them."""
    with quiet_transformers():
        model.hf.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)


def make_record(pruned: Pruned) -> dict[str, Any]:
    """All that is known about a pruning, as JSON knows it."""
    before, after = pruned.parameters
    about = pruned.about
    return {
        "kind": "layerjump pruning",
        "layerjump": __version__,
        # A path says something about a machine, and nothing about the model.
        "model": Path(pruned.original.name).name
        if Path(pruned.original.name).exists()
        else pruned.original.name,
        "fingerprint": about["fingerprint"],
        "method": pruned.method,
        "choice": pruned.criterion,
        "blocks": pruned.original.n_blocks,
        "dropped": list(pruned.dropped),
        "parameters": {"before": before, "after": after},
        "text": about["text"],
        "text_sha256": about["text_sha256"],
        "tokens": about["tokens"],
        "split": about["split"],
        "seed": about["seed"],
        "loss": pruned.loss,
        "distilled": pruned.distilled,
    }


def load_linear(folder: Path, load_base: Callable[[Path], Model]) -> Model:
    """Load a folder of `prune --method linear`: the checkpoint in it by `load_base`, with its maps attached."""
    head = read_json(folder / LINEAR)
    try:
        cuts = [(int(i), int(j)) for i, j in head["cuts"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadArtifact(f"{folder / LINEAR} is damaged: {error}; prune again") from error
    model = load_base(folder / BASE)
    if head.get("fingerprint") != fingerprint(model.hf):
        raise WrongModel(
            f"{folder / BASE} holds other weights than the jumps beside it were saved with; prune again"
        )
    jumps = Jumps.from_pretrained(folder)
    absent = [(i, j) for i, j in cuts if (Site(i), Site(j)) not in jumps]
    if absent:
        i, j = (str(level)[:20] for level in absent[0])
        raise BadArtifact(
            f"{folder / LINEAR} names a map from level {i} to {j}, which {folder} does not hold; prune again"
        )
    dropped = blocks_in_spans(cuts)
    attach_maps(model, {i - sum(block <= i for block in dropped): jumps[i, j] for i, j in cuts})
    return model
