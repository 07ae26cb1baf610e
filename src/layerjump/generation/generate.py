"""generate() and early_exit(): generation with early exit.

Settings of generation that cannot be had with early exit, or not at all: each is an error of its own.

Generation that stops early: as a function, and as a custom generation function of Hugging Face.

lj.generate(model, jumps, "Once upon a time", exit="gap:0.9")
hf.generate(**inputs, custom_generate=lj.early_exit(jumps, "gap:0.9"), max_new_tokens=40)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerjump.errors import BadExit
from layerjump.generation.block_runner import Runner
from layerjump.generation.loop import Choice, Climber, Texts, Verified, filler, write
from layerjump.generation.packed_cpu import blocks_of, with_lean_head
from layerjump.generation.result import Counts, Generated
from layerjump.generation.rules import Drafting, Rule, levels_of, parse_rule
from layerjump.generation.shortlist import shortlist_of
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.serialization import check_model
from layerjump.lens.lens import Lens
from layerjump.models.model import Model, require_model


def check_ranges(generation: Mapping[str, Any]) -> None:
    """Numbers out of range, before Hugging Face meets them."""
    new, temperature, top_p = (
        generation.get(name) for name in ("max_new_tokens", "temperature", "top_p")
    )
    if new is not None and new < 1:
        raise BadExit(f"max_new_tokens given is {new}; give 1 or more")
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise BadExit(f"the temperature given is {temperature:g}; give more than 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise BadExit(f"top_p given is {top_p:g}; give more than 0 and at most 1")


def check_room(model: Model, prompt: int, most: int) -> None:
    """A table of positions has an end; families that compute positions may go on behind it."""
    tables = [module for module in model.stack.modules() if isinstance(module, nn.Embedding)]
    learned = any(table is not model.hf.get_input_embeddings() for table in tables)
    if learned and most > model.max_positions:
        raise BadExit(
            f"{most - prompt:,} more tokens were asked for, but {model.name} has {model.max_positions:,} positions, "
            f"and the prompt takes {prompt:,}; ask for fewer, or shorten the prompt"
        )


def refuse_unsupported(config: GenerationConfig, given: Mapping[str, Any]) -> None:
    """What early exit cannot do is an error, not something else that is done instead."""
    reasons = {
        f"num_beams is {config.num_beams}; give 1": (config.num_beams or 1) > 1,
        "use_cache is off; leave it on": not given.get("use_cache", True),
        "inputs_embeds were given; give input_ids": given.get("inputs_embeds") is not None,
        "a cache with tokens in it was given; give none": _holds_tokens(given),
        "scores, logits, attentions or hidden states were asked for; ask for the tokens alone": any(
            getattr(config, f"output_{name}")
            for name in ("scores", "logits", "attentions", "hidden_states")
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise BadExit(f"early exit does not go with these settings: {reason}")


def _holds_tokens(given: Mapping[str, Any]) -> bool:
    cache = given.get("past_key_values")
    return cache is not None and int(cache.get_seq_length()) > 0


CacheKind = Literal["exact", "jump", "copy"]
MAX_DRAFT_TOKENS = 4


def generate(
    model: Model,
    jumps: Jumps | None,
    prompts: str | Sequence[str] | Mapping[str, Tensor],
    *,
    exit: Rule | str = "never",
    verify: bool = False,
    cache: CacheKind = "exact",
    unverified: int = MAX_DRAFT_TOKENS,
    streamer: Any = None,
    **generation: Any,
) -> Generated:
    """Go on with prompts, each token leaving at the first level where the exit rule is satisfied.

    `jumps` read the levels (None: they are read as they stand). With `verify` the text is the full model's own: at
    most `unverified` tokens that left early stand before it looks. `cache` says what skipped blocks keep of a token:
    its own keys and values, computed later (`exact`); those of a state predicted by a jump (`jump`); those of the
    state it left with (`copy`). Prompts are texts, or left-padded `input_ids` and `attention_mask`; all other settings
    are `model.generate`'s (max_new_tokens, do_sample, temperature, generation_config, stopping_criteria …).
    A `streamer` is Hugging Face's; where it has a method `left`, that is told before each `put` at which levels the
    tokens left: a list with one level a row, None for a row that has ended.
    """
    require_model(model)
    check_ranges(generation)
    if isinstance(prompts, str | Sequence):
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            raise BadExit("no prompt was given; give at least one")
        prompts = model.tokenization.generation_inputs(texts)
        generation.setdefault("pad_token_id", model.tokenization.pad)
    how = EarlyExit(
        jumps,
        exit,
        verify=verify,
        cache=cache,
        unverified=unverified,
        streamer=streamer,
        model=model,
    )
    inputs = {name: given.to(model.device) for name, given in prompts.items()}
    hf: Any = model.hf
    hf.generate(**inputs, custom_generate=how, **generation)
    assert how.result is not None
    return how.result


def early_exit(
    jumps: Jumps | None,
    exit: Rule | str = "never",
    *,
    verify: bool = False,
    cache: CacheKind = "exact",
    unverified: int = MAX_DRAFT_TOKENS,
    streamer: Any = None,
) -> EarlyExit:
    """A custom generation function: `hf.generate(…, custom_generate=lj.early_exit(jumps, exit))`.

    The settings are those of `lj.generate`. Hugging Face hands custom functions neither a streamer nor a tokenizer:
    give the streamer here, and stop strings as a `stopping_criteria`. After a call, `result` says what was done.
    """
    return EarlyExit(
        jumps, exit, verify=verify, cache=cache, unverified=unverified, streamer=streamer
    )


class EarlyExit:
    """What `early_exit` makes. It keeps the result of its last call."""

    def __init__(
        self,
        jumps: Jumps | None,
        exit: Rule | str,
        *,
        verify: bool,
        cache: CacheKind,
        unverified: int,
        streamer: Any,
        model: Model | None = None,
    ) -> None:
        if cache not in get_args(CacheKind):
            raise BadExit(f"the cache given is {cache!r}; give {', '.join(get_args(CacheKind))}")
        if verify and cache != "exact":
            raise BadExit(
                f"verify needs the full model's own keys and values, but the cache given is {cache!r}; give exact"
            )
        if unverified < 1:
            raise BadExit(f"unverified given is {unverified}; give 1 or more")
        self.rule = parse_rule(exit) if isinstance(exit, str) else exit
        self.result: Generated | None = None
        self._jumps, self._verify, self._cache = jumps, verify, cache
        self._unverified, self._streamer = unverified, streamer
        self._model = model
        if model is not None:
            self._check(model)

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **given: Any,
    ) -> Any:
        """What `model.generate` calls, when its own preparations are done."""
        bound = self._bind(model)
        refuse_unsupported(generation_config, given)
        check_room(bound, input_ids.shape[1], stopping_criteria.max_length)
        counts = Counts()
        ends = generation_config._eos_token_tensor
        pad = generation_config._pad_token_tensor
        texts = Texts(
            input_ids,
            stopping_criteria,
            pad=None if pad is None else int(pad),
            ends=frozenset() if ends is None else frozenset(ends.reshape(-1).tolist()),
            streamer=self._streamer,
        )
        climber = self._climber(bound, input_ids, given, counts)
        choice = Choice(logits_processor, sample=bool(generation_config.do_sample))
        if self._verify:
            least = self.rule.least if isinstance(self.rule, Drafting) else 0.0
            loop = Verified(texts, climber, choice, counts, most=self._unverified, least=least)
            loop.write(stopping_criteria.max_length)
        else:
            fill = filler(self._cache, self._jumps, climber.runner, self.rule)
            write(texts, climber, choice, counts, fill)
        self.result = _result(bound, texts, counts)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=texts.result())  # type: ignore[arg-type]
        return texts.result()

    def _climber(
        self, model: Model, ids: Tensor, given: Mapping[str, Any], counts: Counts
    ) -> Climber:
        mask = given.get("attention_mask")
        if mask is not None and bool(mask.all()):
            mask = None  # attention without a mask is faster
        position = given.get("position_ids")
        if position is None:  # families without positions of their own
            whole = torch.ones_like(ids) if mask is None else mask
            position = (whole.long().cumsum(-1) - 1).clamp_min(0)
        runner = Runner(blocks_of(model), model.hf.config, mask, position, counts)
        lens = Lens(with_lean_head(model), self._jumps)
        among = shortlist_of(self.rule)
        early = None if among is None else Lens(among.model(model), self._jumps)
        return Climber(lens, self.rule, runner, counts, among, early)

    def _bind(self, hf: PreTrainedModel) -> Model:
        if self._model is None or self._model.hf is not hf:
            self._model = Model.wrap(hf)
            self._check(self._model)
        return self._model

    def _check(self, model: Model) -> None:
        if model.task != "causal":
            raise BadExit(
                f"{model.name} is a {model.task} model, but only decoders can generate with early exit; give a "
                f"causal language model"
            )
        model.require_predictions()
        levels_of(self.rule, model.n_blocks)
        if (among := shortlist_of(self.rule)) is not None:
            among.check(model)
        if self._jumps is not None:
            check_model(self._jumps, model, allow_other_weights=self._jumps.used_on is not None)
            self._jumps.to(model.device)


def _result(model: Model, texts: Texts, counts: Counts) -> Generated:
    rows = range(len(texts.ids))
    ids = [texts.new(row) for row in rows]
    levels = [
        [texts.levels[row][texts.prompt + place] for place in range(len(ids[row]))] for row in rows
    ]
    prompts = texts.ids[:, : texts.prompt].tolist()
    said = [_added(model, prompt, row) for prompt, row in zip(prompts, ids, strict=True)]
    return Generated(said, ids, levels, model.n_blocks, counts)


def _added(model: Model, prompt: list[int], ids: list[int]) -> str:
    """What new tokens add to a prompt's text; alone, some tokenizers would drop their first blank."""
    if model.tokenizer is None:
        return ""
    before, whole, alone = (
        str(model.tokenizer.decode(each, skip_special_tokens=True))
        for each in (prompt, prompt + ids, ids)
    )
    return whole[len(before) :] if whole.startswith(before) else alone
