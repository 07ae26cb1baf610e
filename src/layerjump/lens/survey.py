"""Survey: what a lens reads over a whole corpus, by document, class of token and level, as one table.

survey = lj.survey(model, jumps, lj.load_text("notes.txt"), output="survey.parquet")
survey.by_level()                     # when predictions are decided, entropy, agreement, surprisal
survey.most_read(12)                  # the tokens that level 12 reads most
survey.frame                          # the table: a row for each document, class of token and level
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet

from layerjump.data.batches import Batch, Batches, make_batches
from layerjump.data.corpus import Corpus, load_text
from layerjump.data.positions import ALL_POSITIONS
from layerjump.data.token_classes import TOKEN_CLASSES, classify_tokens
from layerjump.errors import BadArtifact, BadText, TextTooShort, argument, one_line
from layerjump.io import parse_json, replace_file
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.lens.readout import LensQuery, PromptStates, compute_stats, settled_index
from layerjump.models.model import Model, States, capture_states
from layerjump.models.sites import Site

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

ALL = "all"
"""The name of all classes of tokens together."""
MEANS = ("agreement", "decided", "entropy", "kl", "probability")
"""Columns that are means over positions; `surprisal` is one over the positions that have a target."""
SCHEMA = pa.schema(
    [
        ("document", pa.int32()),
        ("token_class", pa.string()),
        ("level", pa.int32()),
        ("positions", pa.int64()),
        *((name, pa.float64()) for name in MEANS),
        ("surprisal", pa.float64()),
        ("targets", pa.int64()),
        ("tokens", pa.list_(pa.string())),
        ("counts", pa.list_(pa.int32())),
    ]
)
_KEY = b"layerjump"
_DOCUMENTS_AT_ONCE = 64  # their rows are written together
_PENDING_CODES = 1 << 20  # tokens that are counted together

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SurveyInfo:
    """What was surveyed."""

    model: str
    lens: str
    text: str
    sha256: str
    """The hash of the documents."""
    n_blocks: int


@dataclass(frozen=True, eq=False)
class Survey:
    """What a lens reads over a corpus: a row for each document, class of token and level.

    | column | meaning |
    |---|---|
    | `document`, `token_class`, `level` | the row's document in the corpus, class of input token, level |
    | `positions` | how many positions of the document have this class |
    | `agreement` | share of them whose top token is the model's |
    | `decided` | share of them whose top token is the model's here and at all later levels |
    | `entropy`, `kl`, `probability` | means: entropy, KL(model ‖ lens) in nats, probability of the top token |
    | `surprisal`, `targets` | mean −ln p of the next (or masked) token, over the `targets` positions that have one |
    | `tokens`, `counts` | the top tokens at these positions and how often each is read, most frequent first |
    """

    info: SurveyInfo
    source: pa.Table | Path
    """The table, or the Parquet file that holds it."""

    @classmethod
    def load(cls, path: str | Path) -> Survey:
        """Open a survey that `save` or `survey(output=…)` wrote; its rows are read when they are needed."""
        path = Path(path).expanduser()
        with _reading(path):
            schema = parquet.read_schema(path)
        if _KEY not in (schema.metadata or {}) or schema.names != SCHEMA.names:
            raise BadArtifact(f"expected a survey, got {path}; write one by survey(…, output=…)")
        try:
            info = SurveyInfo(**parse_json(schema.metadata[_KEY], path))
        except TypeError as error:
            raise BadArtifact(f"{path} was edited or written by another version: {one_line(error)}") from error
        return cls(info, path)

    def save(self, path: str | Path) -> None:
        """Write the table as Parquet; the file appears when it is complete."""
        _write(Path(path).expanduser(), self.info, self.batches())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, some documents at a time."""
        if isinstance(self.source, pa.Table):
            yield from self.source.to_batches()
            return
        with _reading(self.source), parquet.ParquetFile(self.source) as file:
            yield from file.iter_batches()

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """The whole table as a data frame."""
        return pa.Table.from_batches(self.batches(), SCHEMA).to_pandas()

    def by_level(self) -> pandas.DataFrame:
        """Means over all documents: a row for each class of token (and `all` together) and level."""
        import pandas

        sums = _sum_up(self.batches(), ["token_class", "level"])
        together = sums.groupby("level", as_index=False).sum(numeric_only=True).assign(token_class=ALL)
        return _means(pandas.concat([together, sums], ignore_index=True))

    def by_document(self) -> pandas.DataFrame:
        """A row for each document: the mean level at which a prediction is decided, and means at the last level."""
        sums = _sum_up(self.batches(), ["document", "level"])
        last = _means(sums[sums["level"] == self.info.n_blocks]).set_index("document")
        table = _means(sums).pivot(index="document", columns="level", values="decided")
        # What is decided at a level beyond what was decided at the one before.
        newly = table.diff(axis=1).fillna({table.columns[0]: table[table.columns[0]]})
        last["decided_level"] = (newly * np.asarray(table.columns)).sum(axis=1)
        return last[["positions", "decided_level", "entropy", "surprisal"]].reset_index()

    def most_read(self, level: int, token_class: str | None = None, n: int = 10) -> list[tuple[str, float]]:
        """The tokens that a level reads most, with the share of positions at which each is the top token."""
        known = {level for _, level in self._read}
        if level not in known:
            raise BadText(f"expected a level from {min(known)} to {max(known)}, got {level}")
        if token_class is not None and token_class not in TOKEN_CLASSES:
            raise BadText(f"expected {argument('token_class')} {', '.join(TOKEN_CLASSES)}, got {token_class!r}")
        counts: Counter[str] = Counter()
        for (name, at), counter in self._read.items():
            if at == level and token_class in (None, name):
                counts.update(counter)
        return [(token, count / counts.total()) for token, count in counts.most_common(n)]

    @cached_property
    def _read(self) -> dict[tuple[str, int], Counter[str]]:
        """How often each token is read, by class of token and level, over all documents."""
        read: dict[tuple[str, int], Counter[str]] = {}
        for batch in self.batches():
            columns = (batch.column(name).to_pylist() for name in ("token_class", "level", "tokens", "counts"))
            for name, level, tokens, counts in zip(*columns, strict=True):
                counter = read.setdefault((name, level), Counter())
                for token, count in zip(tokens, counts, strict=True):
                    counter[token] += count
        return read

    def plot(self) -> go.Figure:
        """Agreement, decided predictions, entropy and surprisal by level, a line for each class of token."""
        from layerjump.lens.render.html import plot_survey

        return plot_survey(self)

    def __repr__(self) -> str:
        return f"Survey({self.info.text} by {self.info.model} through {self.info.lens})"


def survey(
    model: Model,
    jumps: Jumps | None,
    corpus: Corpus | str | Path | Sequence[str],
    *,
    output: str | Path | None = None,
    tokens: int | None = None,
    max_length: int = 512,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Read every position of a corpus through a lens and tabulate it by document, class of token and level.

    Memory is that of a batch: rows are written document by document if there is an `output`.

    Args:
        model: The model.
        jumps: The jumps of the lens; None for the logit lens.
        corpus: The documents, or what `load_text` takes.
        output: A Parquet file to write.
        tokens: Number of tokens to read at most. Default: the whole text.
        max_length: Longest sequence; longer documents are cut, and each part has a first position.
        seed: Seed of the masked positions of a masked model, which is read there alone.
        progress: Called with the documents done and the documents to do.
    """
    lens = Lens(model, jumps)
    corpus = corpus if isinstance(corpus, Corpus) else load_text(corpus)
    if not corpus.documents:
        raise BadText(f"expected a corpus with documents, got none in {corpus.name}")
    if tokens is not None and tokens < 1:
        raise BadText(f"expected {argument('tokens')} of 1 or more, got {tokens}")
    info = SurveyInfo(model.name, lens.name, corpus.name, corpus.sha256, model.n_blocks)
    rows = _survey_documents(lens, corpus, tokens, max_length, seed, progress)
    if output is None:
        return Survey(info, pa.Table.from_batches(rows, SCHEMA))
    path = Path(output).expanduser()
    _write(path, info, rows)
    return Survey(info, path)


def _survey_documents(
    lens: Lens,
    corpus: Corpus,
    tokens: int | None,
    max_length: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[pa.RecordBatch]:
    """The rows of some documents after the other."""
    model, n_documents, n_tokens = lens.model, len(corpus.documents), 0
    masks = model.masked or model.pooled is not None

    def cut(documents: range, limit: int | None = None) -> Batches:
        positions = model.prediction_positions if masks else ALL_POSITIONS
        options = {"documents": documents, "seed": seed, "tokens": limit, "max_length": max_length}
        return make_batches(corpus, model.tokenization, positions, **options)  # type: ignore[arg-type]

    for start in range(0, n_documents, _DOCUMENTS_AT_ONCE):
        documents = range(start, min(start + _DOCUMENTS_AT_ONCE, n_documents))
        try:
            batches = cut(documents)
        except TextTooShort:  # none of these has a position to read
            continue
        left = None if tokens is None else tokens - n_tokens
        if left is not None and batches.n_tokens > left:
            batches = cut(documents, left)
        n_tokens += batches.n_tokens
        yield _survey_batches(lens, batches, documents)
        if progress:
            progress(documents.stop, n_documents)
        if tokens is not None and n_tokens >= tokens:
            return
    if not n_tokens:
        raise TextTooShort(f"none of the {n_documents:,} documents of {corpus.name} has a position to read")


@torch.no_grad()
def _survey_batches(lens: Lens, batches: Batches, documents: range) -> pa.RecordBatch:
    """The rows of some documents, which these batches hold."""
    model, sites = lens.model, lens.default_sites
    readouts = {lens.name: [lens.readout(site) for site in sites]}
    sums = _Sums(len(documents), [site.index for site in sites], model.structure.vocab_size)
    for captured in capture_states(model, batches, sites):
        states = PromptStates(
            sites,
            tuple(captured[site] for site in sites),
            captured[Site(model.n_blocks)],
            _targets(model, captured.batch),
        )
        model_top, stats = compute_stats(model, readouts, states, LensQuery(1))
        of_lens = stats[lens.name]
        top = of_lens.top[:, :, 0]
        cells = (captured.batch.document.numpy() - documents.start) * len(TOKEN_CLASSES)
        sums.add(
            cells + _classes(model, captured),
            top.numpy(),
            {
                "agreement": (top == model_top).numpy(),
                "decided": _is_decided(settled_index(top, model_top), len(sites)),
                "entropy": of_lens.entropy.numpy(),
                "kl": of_lens.kl.numpy(),
                "probability": of_lens.probability[:, :, 0].numpy(),
            },
            of_lens.cross_entropy.numpy(),
        )
    return sums.rows(model, documents)


def _is_decided(settled: torch.Tensor, n_levels: int) -> NDArray[np.bool_]:
    """(levels, positions) whether the prediction is decided at a level or before."""
    first = torch.where(settled < 0, n_levels, settled)
    return (torch.arange(n_levels)[:, None] >= first).numpy()


def _targets(model: Model, batch: Batch) -> torch.Tensor:
    """The token that each pick predicts: the next one, or the masked one; −1 where there is none."""
    if model.pooled is not None:
        return torch.full_like(batch.token, -1)
    if model.masked:
        return batch.token
    following = torch.nn.functional.pad(batch.input_ids[:, 1:], (0, 1))
    has_following = torch.nn.functional.pad(batch.attention_mask[:, 1:], (0, 1)).bool()
    return torch.where(has_following, following, -1)[batch.row, batch.position]


def _classes(model: Model, captured: States) -> Ints:
    """The index of the class of the token at each pick; that of a masked token is its class before masking."""
    batch, special = captured.batch, _special_ids(model)
    ids = batch.input_ids.clone()
    ids[batch.row, batch.position] = batch.token
    classes = np.zeros(ids.shape, dtype=np.int64)
    for row, (row_ids, mask) in enumerate(zip(ids.tolist(), batch.attention_mask.tolist(), strict=True)):
        tokens = row_ids[: sum(mask)]
        names = classify_tokens(tokens, model.token_texts(tokens), special)
        classes[row, : len(names)] = [TOKEN_CLASSES.index(name) for name in names]
    return classes[batch.row.numpy(), batch.position.numpy()]


def _special_ids(model: Model) -> set[int]:
    tokenizer = model.tokenization.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


class _Sums:
    """Sums over the positions of each cell: a document and a class of token."""

    def __init__(self, n_documents: int, levels: Sequence[int], vocab_size: int) -> None:
        self.levels, self.vocab_size = levels, vocab_size
        n_cells = n_documents * len(TOKEN_CLASSES)
        self.positions, self.targets = np.zeros(n_cells, np.int64), np.zeros(n_cells, np.int64)
        self.sums = {name: np.zeros((n_cells, len(levels))) for name in (*MEANS, "surprisal")}
        self.codes, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.pending: list[Ints] = []

    def add(self, cells: Ints, top: Ints, means: dict[str, NDArray[Any]], surprisal: NDArray[Any]) -> None:
        """Add positions by their cells; statistics are (levels, positions)."""
        np.add.at(self.positions, cells, 1)
        for name, values in means.items():
            np.add.at(self.sums[name], cells, values.T)
        has_target = ~np.isnan(surprisal[-1])
        np.add.at(self.targets, cells[has_target], 1)
        np.add.at(self.sums["surprisal"], cells[has_target], surprisal[:, has_target].T)
        n_levels = len(self.levels)
        self.pending.append(((cells * n_levels + np.arange(n_levels)[:, None]) * self.vocab_size + top).reshape(-1))
        if sum(map(len, self.pending)) > _PENDING_CODES:
            self._count()

    def _count(self) -> None:
        """Count the tokens that wait; what is kept grows with different tokens, not with positions."""
        codes = np.concatenate([self.codes, *self.pending])
        counts = np.concatenate([self.counts, np.ones(len(codes) - len(self.codes), np.int64)])
        self.codes, inverse = np.unique(codes, return_inverse=True)
        self.counts = np.bincount(inverse, counts, len(self.codes)).astype(np.int64)
        self.pending = []

    def rows(self, model: Model, documents: range) -> pa.RecordBatch:
        """The rows of all cells that have positions."""
        self._count()
        n_levels, n_classes = len(self.levels), len(TOKEN_CLASSES)
        cells = np.repeat(self.positions.nonzero()[0], n_levels)
        level = np.tile(np.arange(n_levels), len(cells) // n_levels)
        # Codes are sorted: those of a row lie together.
        row_starts = np.searchsorted(self.codes, (cells * n_levels + level) * self.vocab_size)
        row_ends = np.searchsorted(self.codes, (cells * n_levels + level + 1) * self.vocab_size)
        used = np.unique(self.codes % self.vocab_size).tolist()
        texts = dict(zip(used, model.prediction_texts(used), strict=True))
        tokens, counts = [], []
        for start, end in zip(row_starts.tolist(), row_ends.tolist(), strict=True):
            order = start + np.argsort(-self.counts[start:end], kind="stable")
            tokens.append([texts[token] for token in (self.codes[order] % self.vocab_size).tolist()])
            counts.append(self.counts[order])
        with np.errstate(invalid="ignore"):
            means = {name: self.sums[name][cells, level] / self.positions[cells] for name in MEANS}
            surprisal = self.sums["surprisal"][cells, level] / self.targets[cells]
        columns = {
            "document": documents.start + cells // n_classes,
            "token_class": [TOKEN_CLASSES[index] for index in cells % n_classes],
            "level": np.asarray(self.levels)[level],
            "positions": self.positions[cells],
            **means,
            "surprisal": pa.array(surprisal, from_pandas=True),
            "targets": self.targets[cells],
            "tokens": tokens,
            "counts": counts,
        }
        return pa.RecordBatch.from_pydict(columns, SCHEMA)


def _write(path: Path, info: SurveyInfo, rows: Iterator[pa.RecordBatch]) -> None:
    schema = SCHEMA.with_metadata({_KEY: json.dumps(asdict(info)).encode()})

    def write(temporary: Path) -> None:
        with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for batch in rows:
                writer.write_batch(batch)

    replace_file(path, write)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise BadArtifact(f"{path} cannot be read as Parquet ({one_line(error)}); write it again") from error


def _sum_up(batches: Iterator[pa.RecordBatch], keys: list[str]) -> pandas.DataFrame:
    """Sums over rows with the same keys; a mean counts with the positions that it is of."""
    import pandas

    total = None
    for batch in batches:
        frame = batch.drop_columns(["tokens", "counts"]).to_pandas()
        frame[list(MEANS)] = frame[list(MEANS)].mul(frame["positions"], axis=0)
        frame["surprisal"] = frame["surprisal"].fillna(0) * frame["targets"]
        columns = ["positions", *MEANS, "surprisal", "targets"]
        frame = pandas.concat([frame[[*keys, *columns]], *([] if total is None else [total])])
        total = frame.groupby(keys, as_index=False).sum()
    assert total is not None
    return total


def _means(sums: pandas.DataFrame) -> pandas.DataFrame:
    """Means from sums; classes in their order."""
    frame = sums.copy()
    frame[list(MEANS)] = frame[list(MEANS)].div(frame["positions"], axis=0)
    frame["surprisal"] = frame["surprisal"] / frame["targets"].where(frame["targets"] > 0)
    if "token_class" in frame:
        order = {name: index for index, name in enumerate((ALL, *TOKEN_CLASSES))}
        frame = frame.sort_values(
            ["token_class", "level"], key=lambda c: c.map(order) if c.name == "token_class" else c
        )
        frame = frame[["token_class", *(name for name in frame if name != "token_class")]]
    return frame.reset_index(drop=True)
