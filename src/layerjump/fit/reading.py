"""The fit documents as they are, for estimators that need gradients: sums will not do for these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerjump import __version__
from layerjump.fit.affine import Affine
from layerjump.fit.fingerprint import about_model
from layerjump.fit.jumps import Jumps
from layerjump.fit.pairs import Pair
from layerjump.fit.records import JumpInfo, Provenance
from layerjump.inputs.batches import Batches, batches
from layerjump.inputs.corpus import Corpus, read, split
from layerjump.inputs.models import Model
from layerjump.inputs.positions import Positions


@dataclass(frozen=True)
class Reading:
    """What an estimator reads: the documents that `fit` would fit on, with the same sizes and seed."""

    model: Model
    corpus: Corpus
    where: Positions
    sizes: str
    seed: int
    batches: Batches

    @classmethod
    def of(
        cls,
        model: Model,
        text: Corpus | str | Path,
        where: Positions,
        *,
        tokens: int | None,
        sizes: str,
        seed: int,
        **cut: Any,
    ) -> Reading:
        """Cut the fit documents of a text into batches; `cut` is handed on to `batches`."""
        corpus = text if isinstance(text, Corpus) else read(text)
        documents = split(len(corpus.documents), sizes, seed=seed).fit
        found = batches(
            corpus,
            model.tokens,
            where,
            documents=documents,
            seed=seed,
            tokens_wanted=tokens,
            **cut,
        )
        return cls(model, corpus, where, sizes, seed, found)

    def jumps(
        self,
        maps: Mapping[Pair, Affine],
        estimator: str,
        settings: dict[str, Any],
        *,
        n_fit: int,
        rank: int | None = None,
    ) -> Jumps:
        """The maps with all that is known of how they were made."""
        known = Provenance(
            **about_model(self.model),
            text=self.corpus.name,
            text_sha256=self.corpus.sha256,
            tokens=self.batches.n_tokens,
            positions=str(self.where),
            skip_first=self.where.skip_first,
            special=self.where.special,
            split=self.sizes,
            n_fit=n_fit,
            n_select=0,
            n_test=0,
            seed=self.seed,
            estimator=estimator,
            settings=settings,
            layerjump=__version__,
        )
        return Jumps.of(maps, {pair: JumpInfo(*pair, estimator, rank=rank) for pair in maps}, known)
