"""Held-out scores of jumps as a lens: what a model card states, and what is recorded in their provenance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from layerjump.data.batches import make_batches
from layerjump.data.corpus import Corpus, load_text, split_indices
from layerjump.errors import BadText, argument
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.model_card import HeldOutScores
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.models.model import Model

POSITIONS = 512
"""Positions of the held-out documents that are scored."""


def with_held_out_scores(
    model: Model, jumps: Jumps, text: Corpus | str | Path, *, positions: int = POSITIONS, max_length: int = 256
) -> Jumps:
    """Return the jumps with their scores and the logit lens' on held-out documents in `provenance.settings`.

    Documents are those of the test split, if the text is the one of the fit; all of another text.
    """
    corpus = text if isinstance(text, Corpus) else load_text(text)
    provenance = jumps.provenance
    documents: tuple[int, ...] = tuple(range(len(corpus.documents)))
    if corpus.sha256 == provenance.text_sha256:
        documents = split_indices(len(corpus.documents), provenance.split, seed=provenance.seed).test
    if not documents:
        raise BadText(f"expected test documents in {corpus.name}, got none; fit with {argument('split', '80/10/10')}")
    batches = make_batches(
        corpus,
        model.tokenization,
        model.prediction_positions,
        documents=documents,
        tokens=positions,
        seed=provenance.seed,
        max_length=max_length,
    )
    lenses = {"identity": Lens(model), "jumps": Lens(model, jumps)}
    scores = evaluate_lenses(model, lenses, batches, levels=lenses["jumps"].levels)
    kl, hits = scores.kl.double().mean(-1), scores.hits(1).double().mean(-1)
    held_out = HeldOutScores(
        text=corpus.name,
        text_sha256=corpus.sha256,
        positions=scores.n_examples,
        level=list(lenses["jumps"].levels[:-1]),
        kl=_rounded(kl[1, :-1].tolist()),
        kl_identity=_rounded(kl[0, :-1].tolist()),
        agreement=_rounded(hits[1, :-1].tolist()),
        agreement_identity=_rounded(hits[0, :-1].tolist()),
    )
    settings = provenance.settings | {"held_out": vars(held_out)}
    scored = Jumps({pair: jumps[pair] for pair in jumps}, jumps.info, replace(provenance, settings=settings))
    scored.folder, scored.used_on = jumps.folder, jumps.used_on
    return scored


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
