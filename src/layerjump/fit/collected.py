"""The sums of a run's three splits, with where they come from: saved, loaded, merged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from layerjump.errors import BadArtifact, BadMoments, NewerFormat, WrongModel, one_line
from layerjump.fit.description import check_members
from layerjump.fit.files import parse_json, read_tensors, write_tensors
from layerjump.fit.modules import FEATURES
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair
from layerjump.fit.records import Provenance
from layerjump.inputs.sites import Site

FORMAT = 1
KIND = "layerjump moments"
SPLITS = ("fit", "select", "test")
_OF_A_FIT = ("n_fit", "n_select", "n_test", "estimator", "settings", "layerjump")
ABOUT = [each.name for each in dataclasses.fields(Provenance) if each.name not in _OF_A_FIT]
"""What is known of a run before anything is fitted."""

MOST_KEPT = 100_000
"""Raw states that a file may say it keeps: room for all of them is taken at once."""


@dataclass(frozen=True)
class Collected:
    """Moments of the fit, select and test documents, and what was run to get them."""

    splits: dict[str, Moments]
    about: dict[str, Any]

    @property
    def fit(self) -> Moments:
        return self.splits["fit"]

    @property
    def select(self) -> Moments:
        return self.splits["select"]

    @property
    def test(self) -> Moments:
        return self.splits["test"]

    def save(self, path: Path, *, progress: dict[str, int] | None = None) -> None:
        """Write everything to one file; `progress` marks an unfinished run."""
        tensors = {
            f"{split}|{name}": tensor
            for split, moments in self.splits.items()
            for name, tensor in pack(moments).items()
        }
        head = {
            "format": FORMAT,
            "about": self.about,
            "pairs": [[str(a), str(b)] for a, b in self.fit.pairs],
            "full_targets": self.fit.full_targets,
            "reads": self.fit.reads,
            "reservoir": self.fit.reservoir.size,
            "n": {split: moments.n for split, moments in self.splits.items()},
            "progress": progress,
        }
        write_tensors(path, tensors, {"kind": KIND, "head": json.dumps(head)})

    @classmethod
    def load(cls, path: Path) -> Collected:
        """Read a finished run's sums."""
        collected, progress = cls.load_unfinished(path)
        if progress is not None:
            raise BadArtifact(
                f"{path} holds the sums of an unfinished run; finish it with --resume"
            )
        return collected

    @classmethod
    def load_unfinished(cls, path: Path) -> tuple[Collected, dict[str, int] | None]:
        """Read sums, and how far the run had come (None: to its end)."""
        tensors, metadata = read_tensors(path)
        if metadata.get("kind") != KIND:
            raise BadArtifact(
                f"{path} is no file of moments; `layerjump fit --save-moments` writes them"
            )
        try:
            head = parse_json(metadata["head"], path)
            if head["format"] > FORMAT:
                raise NewerFormat(
                    f"{path} has moments format {head['format']}, but this layerjump knows {FORMAT}; upgrade it"
                )
            pairs = [(Site.parse(a), Site.parse(b)) for a, b in head["pairs"]]
            check_members(Provenance, head["about"], ABOUT, path)
            if type(head["about"]["max_length"]) is not int:
                raise ValueError("max_length is no integer")
            splits = {split: _unpack(split, head, pairs, tensors) for split in SPLITS}
            return cls(splits, head["about"]), head["progress"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise BadArtifact(
                f"{path} is damaged: {type(error).__name__} {one_line(error)}; collect the sums again"
            ) from error


def merge(runs: Sequence[Collected]) -> Collected:
    """Add several runs' sums: other text, other machines, other days, but the same model."""
    first = runs[0]
    kept = first.fit
    made = {
        split: Moments(
            kept.pairs,
            reservoir=kept.reservoir.size,
            full_targets=kept.full_targets,
            reads=kept.reads,
        )
        for split in SPLITS
    }
    texts: list[str] = []
    for run in runs:
        _check_same_model(first, run)
        if run.about["text_sha256"] in texts:
            raise BadMoments(
                f"the text {run.about['text']!r} is in more than one of these runs; merging would count it twice"
            )
        texts.append(run.about["text_sha256"])
        for split, part in run.splits.items():
            made[split].merge(part)
    about = first.about | {
        "text": " + ".join(run.about["text"] for run in runs),
        "text_sha256": "+".join(texts),
        "tokens": sum(run.about["tokens"] for run in runs),
    }
    return Collected(made, about)


def _check_same_model(first: Collected, run: Collected) -> None:
    if first.about["fingerprint"] != run.about["fingerprint"]:
        raise WrongModel(
            f"these sums come from different weights: {first.about['model']} ({first.about['fingerprint'][:12]}) and "
            f"{run.about['model']} ({run.about['fingerprint'][:12]}); merge runs of one model only"
        )


def pack(moments: Moments) -> dict[str, Tensor]:
    """Everything a `Moments` holds, by name."""
    tensors = dict(moments.sums)
    tensors |= {f"shift/{site}": shift for site, shift in moments.shift.items()}
    if len(moments.reservoir.keys):
        tensors["reservoir-keys"] = moments.reservoir.keys
    tensors |= {f"reservoir/{site}": rows for site, rows in moments.reservoir.states.items()}
    return tensors


def _unpack(
    split: str, head: dict[str, Any], pairs: list[Pair], tensors: dict[str, Tensor]
) -> Moments:
    reads = head.get("reads", "raw")  # files older than features have no such key
    if reads not in FEATURES:
        raise ValueError(f"there are no features {reads!r}")
    size = head["reservoir"]
    if type(size) is not int or not 0 <= size <= MOST_KEPT:
        raise ValueError(f"it keeps {str(size)[:50]} states")
    moments = Moments(pairs, reservoir=size, full_targets=head["full_targets"], reads=reads)
    moments.n = head["n"][split]
    if not pairs:
        raise ValueError("it pairs no sites")
    if type(moments.n) is not int or not 0 <= moments.n < 2**53:
        raise ValueError(f"the {split} split has {str(moments.n)[:50]} positions")
    mine = {
        name.partition("|")[2]: t for name, t in tensors.items() if name.startswith(f"{split}|")
    }
    if not mine and moments.n:
        raise ValueError(f"the {split} split has {moments.n} positions, but no sums")
    if not mine:
        return moments
    reservoir = {
        Site.parse(name.removeprefix("reservoir/")): mine.pop(name)
        for name in list(mine)
        if name.startswith("reservoir/")
    }
    if reservoir:
        moments.reservoir.add(reservoir, mine.pop("reservoir-keys"))
    shift = {site: mine.pop(f"shift/{site}") for site in moments.sites}
    # Before any room is taken: a shift may claim to be very wide.
    if moments.shapes(shift) != {name: tuple(tensor.shape) for name, tensor in mine.items()}:
        raise ValueError(f"the {split} split's sums are not those of its pairs")
    moments.set_shift(shift)
    # Copied into tensors of our own: matrix products round differently on memory aligned as in a file.
    for name, total in moments.sums.items():
        total.copy_(mine[name])
    return moments
