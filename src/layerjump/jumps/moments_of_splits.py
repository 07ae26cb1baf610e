"""Moments of the fit, validation and test splits of one run: their file, and merging the runs of several texts."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from layerjump.errors import BadArtifact, BadMoments, NewerFormat, WrongModel, argument, one_line
from layerjump.io import parse_json, read_metadata, read_tensors, write_tensors
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.maps import FeatureKind
from layerjump.jumps.moments import Moments
from layerjump.jumps.serialization import Pairing, RunInfoRecord, StrictRecord, read_record
from layerjump.jumps.text_shards import MAX_SHARDS, TextShard, describe_shards
from layerjump.models.sites import Site, parse_source

log = logging.getLogger("layerjump")

SPLITS = ("fit", "validation", "test")
MAX_LENGTH = 512
"""Longest sequence, unless a run is planned with another; longer documents are cut."""
FORMAT = 1
KIND = "layerjump moments"
MAX_SAMPLED = 100_000
"""Raw states that a file may claim to hold: memory for all of them is allocated at once."""


@dataclass(frozen=True)
class SplitMoments:
    """Moments of the fit, validation and test documents, and the run they come from."""

    fit: Moments
    validation: Moments
    test: Moments
    info: RunInfo
    max_length: int = MAX_LENGTH
    texts: tuple[TextShard, ...] = ()
    """The documents that were read; empty for all documents of the text."""

    @property
    def shards(self) -> tuple[TextShard, ...]:
        """The documents that were read."""
        return self.texts or _whole_texts(self.info)

    @property
    def splits(self) -> dict[str, Moments]:
        """The moments by the name of their split."""
        return {"fit": self.fit, "validation": self.validation, "test": self.test}

    def select(self, sources: Sequence[Site]) -> SplitMoments:
        """Return the moments of some sources alone; they share the sums of these."""
        pairs = [pair for pair in self.fit.pairs if pair[0] in sources]
        selected = {name: moments.subset(pairs, sample=True) for name, moments in self.splits.items()}
        return SplitMoments(**selected, info=self.info, max_length=self.max_length, texts=self.texts)

    def fill(self, parts: Sequence[SplitMoments]) -> None:
        """Take over moments of the same rows, of which each part holds some of the sources."""
        for name, moments in self.splits.items():
            moments.join([part.splits[name] for part in parts])

    def save(self, path: Path, *, progress: Mapping[str, int] | None = None) -> None:
        """Write everything to one file; `progress` (batches done by split) marks an unfinished run."""
        tensors: dict[str, Tensor] = {}
        for split, moments in self.splits.items():
            named = moments.sums.named() if moments.sums else {}
            named |= {f"shift/{site}": shift for site, shift in moments.shift.items()}
            if len(moments.reservoir.keys):
                named["reservoir-keys"] = moments.reservoir.keys
            named |= {f"reservoir/{site}": rows for site, rows in moments.reservoir.states.items()}
            tensors |= {f"{_ON_DISK[split]}|{name}": tensor for name, tensor in named.items()}
        about = asdict(self.info) | {"max_length": self.max_length, "n_pairs": len(self.fit.pairs)}
        header = {
            "format": FORMAT,
            "about": about,
            "pairs": [[str(source), str(target)] for source, target in self.fit.pairs],
            "full_targets": self.fit.full_targets,
            "reads": self.fit.features,
            "products": _DTYPES[self.fit.products],
            "texts": [asdict(shard) for shard in self.shards],
            "reservoir": self.fit.reservoir.size,
            "n": {_ON_DISK[split]: moments.n for split, moments in self.splits.items()},
            "progress": progress and {_ON_DISK[name]: step for name, step in progress.items()},
        }
        write_tensors(path, tensors, {"kind": KIND, "head": json.dumps(header)})

    @classmethod
    def load(cls, path: Path) -> SplitMoments:
        """Read the moments of a finished run."""
        if read_header(path).progress is not None:
            raise BadArtifact(
                f"{path} holds the moments of an unfinished run; finish it with {argument('resume', True)}"
            )
        return cls.load_sources(path)

    @classmethod
    def load_sources(cls, path: Path, sources: Sequence[Site] | None = None) -> SplitMoments:
        """Read the moments of a run that may be unfinished, of some sources or of all."""
        header = read_header(path)
        tensors, _ = read_tensors(path)
        try:
            splits = {name: _unpack(_ON_DISK[name], header, tensors, sources) for name in SPLITS}
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadArtifact(
                f"{path} is damaged: {type(error).__name__} {one_line(error)}; collect the moments again"
            ) from error
        return cls(**splits, info=header.info, max_length=header.about.max_length, texts=header.shards)


def _whole_texts(info: RunInfo) -> tuple[TextShard, ...]:
    """All documents of the texts of a run; a file of an older version joins their hashes."""
    return tuple(TextShard(info.text, sha256) for sha256 in info.text_sha256.split("+"))


def read_header(path: Path) -> MomentsHeader:
    """Read the description in a moments file, without its tensors."""
    metadata = read_metadata(path)
    if metadata.get("kind") != KIND or "head" not in metadata:
        raise BadArtifact(f"{path} is not a moments file; fit with {argument('save_moments', True)} to write one")
    data = parse_json(metadata["head"], path)
    version = read_record(_Version, data, path).format
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has moments format {str(version)[:50]}, but this layerjump reads up to {FORMAT}; upgrade it"
        )
    return read_record(MomentsHeader, data, path)


def merge_moments(runs: Iterable[SplitMoments]) -> SplitMoments:
    """Add the moments of several runs: other text, other machines, other days, but the same model.

    Raises `BadMoments` if documents are in more than one of the runs.
    """
    merged: SplitMoments | None = None
    for run in runs:
        if merged is None:
            merged = copy.deepcopy(run)
        else:
            _check_mergeable(merged.info, merged.shards, run.info, run.shards)
            merged = _add_run(merged, run)
    if merged is None:
        raise BadMoments("expected moments of at least one run to merge, got none")
    return merged


def merge_moments_files(paths: Sequence[Path]) -> SplitMoments:
    """Add the moments of several files, of which one at a time is in memory.

    A file whose documents are all in others is left out with a note, so that merging again what was merged already
    changes nothing. The sums of shards are added in the order of the shards.
    """
    headers = {path: read_header(path) for path in dict.fromkeys(paths)}
    texts = list(dict.fromkeys(header.shards[0].sha256 for header in headers.values()))
    # The files with the most texts and shards first: others may be parts of them.
    order = sorted(
        headers,
        key=lambda path: (
            -len(headers[path].shards),
            texts.index(headers[path].shards[0].sha256),
            headers[path].shards[0].index,
        ),
    )
    merged: SplitMoments | None = None
    for path in order:
        if merged is None:
            merged = SplitMoments.load(path)
            continue
        if set(headers[path].shards) <= set(merged.shards):
            log.warning("%s is left out: its documents are in the other files", path)
            continue
        _check_mergeable(merged.info, merged.shards, headers[path].info, headers[path].shards)
        merged = _add_run(merged, SplitMoments.load(path))
    if merged is None:
        raise BadMoments("expected at least one moments file to merge, got none")
    return merged


def _check_mergeable(
    ours: RunInfo, our_shards: Sequence[TextShard], theirs: RunInfo, their_shards: Sequence[TextShard]
) -> None:
    if ours.fingerprint != theirs.fingerprint:
        raise WrongModel(
            f"these moments come from different weights: {ours.model} ({ours.fingerprint[:12]}) and {theirs.model} "
            f"({theirs.fingerprint[:12]}); merge runs of one model only"
        )
    for shard in their_shards:
        if any(shard.overlaps(other) for other in our_shards):
            raise BadMoments(
                f"documents of {describe_shards([shard])!r} are in more than one of these runs; merging would count "
                f"them twice: leave out one of them"
            )
        # Otherwise documents that one run fits on could be test documents of the other.
        is_shared = any(shard.sha256 == other.sha256 for other in our_shards)
        if is_shared and (ours.split, ours.seed) != (theirs.split, theirs.seed):
            raise BadMoments(
                f"shards of {shard.text!r} were collected with different splits or seeds: {ours.split} with seed "
                f"{ours.seed}, and {theirs.split} with seed {theirs.seed}; collect them with the same"
            )


def _add_run(merged: SplitMoments, run: SplitMoments) -> SplitMoments:
    for name, moments in run.splits.items():
        merged.splits[name].merge(moments)
    shards = (*merged.shards, *run.shards)
    info = replace(
        merged.info,
        text=describe_shards(shards),
        text_sha256="+".join(dict.fromkeys(shard.sha256 for shard in shards)),
        tokens=merged.info.tokens + run.info.tokens,
    )
    return replace(merged, info=info, texts=shards)


class _Version(StrictRecord):
    format: int


class _About(RunInfoRecord):
    max_length: int


_DTYPES: dict[torch.dtype, Literal["float32", "float64"]] = {torch.float32: "float32", torch.float64: "float64"}


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _TextShardRecord(StrictRecord):
    text: str
    sha256: str
    index: _Count
    count: Annotated[int, Field(gt=0, le=MAX_SHARDS)]


class MomentsHeader(StrictRecord):
    """The header of a moments file. Files of older versions lack `reads`, or `products` and `texts`."""

    about: _About
    pairs: Annotated[list[Pairing], Field(min_length=1)]
    full_targets: bool
    reads: FeatureKind = "raw"
    products: Literal["float32", "float64"] | None = None
    texts: Annotated[list[_TextShardRecord], Field(min_length=1)] | None = None
    reservoir: Annotated[int, Field(ge=0, le=MAX_SAMPLED)]
    n: dict[Literal["fit", "select", "test"], _Count]
    progress: dict[Literal["fit", "select", "test"], _Count] | None

    @property
    def info(self) -> RunInfo:
        """The run that the moments come from."""
        return RunInfo(**self.about.model_dump(exclude={"max_length"}))

    @property
    def shards(self) -> tuple[TextShard, ...]:
        """The documents that were read."""
        if self.texts is None:
            return _whole_texts(self.info)
        return tuple(TextShard(**record.model_dump()) for record in self.texts)

    @property
    def done(self) -> dict[str, int]:
        """The number of batches of every split that are in the sums of an unfinished run: the first ones, in order."""
        progress = self.progress or {}
        return {name: progress[_ON_DISK[name]] for name in SPLITS if _ON_DISK[name] in progress}


_ON_DISK: dict[str, Literal["fit", "select", "test"]] = {"fit": "fit", "validation": "select", "test": "test"}
"""Name of every split in a moments file."""


def _unpack(
    split: Literal["fit", "select", "test"],
    header: MomentsHeader,
    tensors: Mapping[str, Tensor],
    sources: Sequence[Site] | None,
) -> Moments:
    moments = Moments(
        header.pairs,
        reservoir=header.reservoir,
        full_targets=header.full_targets,
        products=getattr(torch, header.products or "float64"),
        features=header.reads,
    )
    moments.n = header.n[split]
    stored = {
        name.removeprefix(f"{split}|"): tensor for name, tensor in tensors.items() if name.startswith(f"{split}|")
    }
    if not stored and moments.n:
        raise ValueError(f"the {split} split has {moments.n} positions, but no sums")
    if stored:
        sampled = {
            parse_source(name.removeprefix("reservoir/")): stored.pop(name)
            for name in list(stored)
            if name.startswith("reservoir/")
        }
        if sampled:
            moments.reservoir.add(sampled, stored.pop("reservoir-keys"))
        moments.shift = {site: stored.pop(f"shift/{site}") for site in moments.sites}
        # Compared before memory is allocated: a shift may claim to be very wide.
        layout = moments.zeros("meta")
        if {name: sums.shape for name, sums in layout.named().items()} != {n: t.shape for n, t in stored.items()}:
            raise ValueError(f"the {split} split's sums are not those of its pairs")
        moments.sums = layout.filled(stored)
    if sources is not None:
        moments = moments.subset([pair for pair in moments.pairs if pair[0] in sources], sample=True)
    if moments.sums is not None:
        # Copied into memory of our own: matrix products round differently on memory aligned as in a file.
        in_file = moments.sums.named()
        moments.set_shift(moments.shift)
        for name, total in moments.sums.named().items():
            total.copy_(in_file[name])
    return moments
