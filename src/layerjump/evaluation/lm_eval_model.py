"""The model `layerjump` registered with lm-eval.

    python -m layerjump.evaluation run --model layerjump --model_args pretrained=smollm2 jumps=jumps exit=gap:0.9

Requests, tokens, batches and caches are lm-eval's. With an exit rule the logits of the positions that are scored are
replaced by those of the level where the rule stops; a position that goes up to level L keeps the model's own.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from layerjump.errors import BadEvaluation
from layerjump.evaluation.early_exit import make_variant
from layerjump.generation.generate import early_exit
from layerjump.generation.rules import Rule
from layerjump.jumps.jumps import Jumps
from layerjump.models.hooks import Capture
from layerjump.models.loading import load
from layerjump.models.model import Model
from layerjump.models.structure import Site

Request = tuple[Any, list[int], list[int]]
"""What was asked, and the tokens of context and continuation."""


@register_model("layerjump")
class LayerjumpLM(HFLM):
    """`pretrained` is anything `lj.load` takes; jumps, exit, level, parts and blocks are those of `how`."""

    def __init__(
        self,
        pretrained: str | Path | Model,
        jumps: str | Path | Jumps | None = None,
        exit: str | Rule | None = None,
        level: int | None = None,
        parts: str | None = None,
        blocks: str | None = None,
        revision: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> None:
        if not isinstance(pretrained, Model):
            pretrained = load(
                pretrained,
                revision=revision,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
        asked = make_variant(
            pretrained, jumps=jumps, exit=exit, level=level, parts=parts, blocks=blocks
        )
        self._ours = pretrained
        self._early = early_exit(asked.jumps, asked.rule)
        self.silent = False
        """Whether lm-eval's bars are left out."""
        self.reader = asked.reader(pretrained)
        self.truncated = 0
        """Requests that were longer than the model's context, and lost their beginning."""
        self._scored: dict[tuple[int, ...], int] = {}
        # A copy, because lm-eval may give the tokenizer a padding token.
        tokenizer = copy.deepcopy(pretrained.tokenization.tokenizer)
        super().__init__(pretrained.hf, tokenizer=tokenizer, **settings)
        self._changes = ExitStack()
        self._changes.enter_context(asked.changed(pretrained))

    def close(self) -> None:
        """Give the model its own parts back."""
        self._changes.close()

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.silent)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for asked, context, continuation in requests:
            self._note(asked, context, continuation)
        try:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        finally:
            self._scored.clear()

    def _note(self, asked: Any, context: list[int], continuation: list[int]) -> None:
        """Remember how many tokens of an input are scored: lm-eval does not say so when it calls the model."""
        if not 0 < len(continuation) <= self.max_length:
            raise BadEvaluation(
                f"the continuation {str(asked and asked[1])[:40]!r} has {len(continuation)} tokens, but this model "
                f"scores 1 to {self.max_length}; leave the item out"
            )
        whole = context + continuation
        self.truncated += len(whole) > self.max_length + 1
        seen = tuple(whole[-(self.max_length + 1) :][:-1])
        self._scored[seen] = max(len(continuation), self._scored.get(seen, 0))

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        if not self.reader.levels:
            return super()._model_call(inps, attn_mask, labels)
        rows = torch.tensor(self._scored_rows(inps.tolist()), dtype=torch.long)
        sites = [Site(level) for level in self.reader.levels]
        with Capture(self._ours.structure, sites) as capture:
            capture.start(rows)
            logits = super()._model_call(inps, attn_mask, labels)
            at = capture.take()
        rows = rows.to(logits.device)
        row, place = rows // inps.shape[1], rows % inps.shape[1]
        for some, early in self.reader.read(at, place):
            logits[row[some], place[some]] = early.to(logits.dtype)
        return logits

    def _scored_rows(self, inputs: list[list[int]]) -> list[int]:
        """Places in the flattened (rows · tokens) logits that are scored."""
        found: set[int] = set()
        for row, ids in enumerate(inputs):
            # Inputs are filled up with zeros on the right; where one ends is found by what was asked.
            for end in range(len(ids), 0, -1):
                count = self._scored.get(tuple(ids[:end]), 0)
                found.update(row * len(ids) + place for place in range(end - count, end))
                if ids[end - 1]:
                    break
        return sorted(found)

    def _model_generate(self, *args: Any, **settings: Any) -> Any:
        if self.reader.levels:
            settings["custom_generate"] = self._early
        return super()._model_generate(*args, **settings)
