"""Generation with early exit, as a function and as a custom generation function for Hugging Face.

lj.generate(model, jumps, "Once upon a time", exit="gap:0.9")
lj.generate(model, None, "Once upon a time", verify=True, drafts="lookup")
hf.generate(**inputs, custom_generate=lj.early_exit(jumps, "gap:0.9"), max_new_tokens=40)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from html import escape
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerjump.data.chat import warn_of_plain_text
from layerjump.errors import BadExit, argument
from layerjump.generation.block_runner import BlockRunner, Counts, prompt_positions
from layerjump.generation.combine_drafters import FREE, DraftConfig, DrafterName, Drafting, step_costs
from layerjump.generation.decoding_loop import CacheKind, Decoder, ExitDrafter, Sequences
from layerjump.generation.drafters import Drafter
from layerjump.generation.exit_rules import ExitConfig, Never, Rule, checked_levels
from layerjump.generation.exit_self_check import require_exits
from layerjump.generation.packed_llama import choose_blocks
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.serialization import check_model
from layerjump.models.model import Model, require_model

MAX_EXIT_DRAFTS = 4
"""Exit drafts in one verification step unless a calibration says otherwise."""


@dataclass(frozen=True)
class Generated:
    """Generated texts. Lists have one entry per prompt."""

    text: list[str]
    """The text added to each prompt; empty strings where the model has no tokenizer."""
    ids: list[list[int]]
    """The new tokens, with an end-of-text token but without padding."""
    exit_levels: list[list[int]]
    """The level at which each new token exited: L where the full model ran, 0 for drafts made without any block."""
    drafters: list[list[str | None]]
    """The drafter of each new token; None: the full model itself."""
    n_blocks: int
    counts: Counts
    tokens: list[list[str]] = field(default_factory=list)
    """The text of each new token; empty where the model has no tokenizer."""

    @property
    def n_tokens(self) -> int:
        """The number of new tokens."""
        return sum(map(len, self.ids))

    @property
    def blocks_saved(self) -> float:
        """The share of blocks that tokens did not wait for: 1 − mean exit level / L.

        With the `exact` cache most of these blocks run later, together with another token's.
        """
        levels = [level for row in self.exit_levels for level in row]
        return 1 - sum(levels) / (len(levels) * self.n_blocks) if levels else 0.0

    @property
    def agreement(self) -> float | None:
        """The share of drafts that the full model accepted; None without `verify` or without drafts."""
        return self.counts.accepted / self.counts.drafts if self.counts.drafts else None

    def __repr__(self) -> str:
        seconds = sum(self.counts.seconds.values())
        return (
            f"Generated({self.n_tokens} tokens, {self.blocks_saved:.0%} of blocks not waited for, "
            f"{self.n_tokens / seconds if seconds else 0:.1f} tokens/s)"
        )

    def _repr_html_(self) -> str:
        """The texts, with tokens that exited early in green, the earlier the stronger; the title has the level."""
        lines = []
        for text, tokens, levels in zip(
            self.text, self.tokens or [[] for _ in self.text], self.exit_levels, strict=True
        ):
            pieces = [
                f'<span title="level {level} of {self.n_blocks}" '
                f'style="background:rgba(0,158,115,{0.7 * (1 - level / self.n_blocks):.2f})">{escape(token)}</span>'
                for token, level in zip(tokens, levels, strict=True)
            ]
            lines.append(f'<p style="white-space:pre-wrap">{"".join(pieces) or escape(text)}</p>')
        return f"{''.join(lines)}<p><small>{escape(repr(self))}</small></p>"


def generate(
    model: Model,
    jumps: Jumps | None,
    prompts: str | Sequence[str] | Mapping[str, Tensor],
    *,
    exit: ExitConfig | Rule | str = "never",
    verify: bool = False,
    cache: CacheKind = "exact",
    drafts: DraftConfig | str | Sequence[str] | None = None,
    max_draft_tokens: int | None = None,
    streamer: Any = None,
    **generation: Any,
) -> Generated:
    """Continue prompts; each token exits at the first level where the exit rule fires.

    `prompts` are texts, or left-padded `input_ids` with their `attention_mask`. `jumps` map the levels' states to
    level L before they are unembedded; None reads them as they are (the logit lens).

    `exit` is a rule, its short name (gap:0.9, fixed:20, …) or a calibrated configuration.

    With `verify` the text is the full model's own: `drafts` names the drafters that propose tokens, which the full
    model verifies several at a time, at most `max_draft_tokens` in one step. They are one or more of lookup (what
    followed the same tokens before), recycled (what the model predicted after the same token), head (a jump
    `final@-1+embedding` → `final`), splice (the first blocks, a jump such as `1+26@-1` → `26`, the last blocks) and
    exit (the exit rule). The default is what calibration chose, else exit if `exit`
    is a rule that can fire, else lookup and recycled, which need no fitting.

    `cache` chooses the keys and values of a token in the blocks that it skipped: its own, computed
    later (`exact`), those of a state predicted by a jump (`jump`), or those of its state at the exit level (`copy`).

    A `streamer` is Hugging Face's. If it has a method `put_exit_levels`, that is called before each `put` with a list
    of the tokens' exit levels, one per row, None for a row that has ended; likewise `put_drafters` with the names of
    their drafters, None for tokens of the full model, and `put_rejected` with the drafts (`token`, `drafter`) that they
    took the place of, None where there was none. All other keywords are those of
    `model.generate`: max_new_tokens, do_sample, temperature, generation_config, stopping_criteria, …
    """
    require_model(model)
    check_ranges(generation)
    if isinstance(prompts, str | Sequence):
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            raise BadExit(f"{argument('prompts')} is empty; give at least one prompt")
        prompts = model.tokenization.generation_inputs(texts)
        warn_of_plain_text(model.name, model.tokenizer, texts, stacklevel=2)
        generation.setdefault("pad_token_id", model.tokenization.pad)
    if "generation_config" not in generation:
        generation.setdefault("use_cache", True)  # off in some configurations (MPT)
    custom_generate = EarlyExit(
        jumps, exit, verify=verify, cache=cache, drafts=drafts, max_draft_tokens=max_draft_tokens, streamer=streamer
    )
    custom_generate.use_model(model)
    inputs = {name: tensor.to(model.device) for name, tensor in prompts.items()}
    hf: Any = model.hf
    hf.generate(**inputs, custom_generate=custom_generate, **generation)
    assert custom_generate.result is not None
    return custom_generate.result


@dataclass(eq=False)
class EarlyExit:
    """A custom generation function: `hf.generate(…, custom_generate=lj.early_exit(jumps, exit))`.

    The settings are those of `lj.generate`. Hugging Face passes neither its streamer nor its tokenizer to custom
    functions: give the streamer here, and stop strings as a `stopping_criteria`.
    """

    jumps: Jumps | None
    exit: ExitConfig | Rule | str = "never"
    _: KW_ONLY
    verify: bool = False
    cache: CacheKind = "exact"
    drafts: DraftConfig | str | Sequence[str] | None = None
    max_draft_tokens: int | None = None
    streamer: Any = None
    model: Model | None = field(default=None, init=False)
    """The model of the last call."""
    result: Generated | None = field(default=None, init=False)
    """The outcome of the last call."""

    def __post_init__(self) -> None:
        if self.cache not in get_args(CacheKind):
            raise BadExit(f"{argument('cache')} must be one of {', '.join(get_args(CacheKind))}, got {self.cache!r}")
        if self.verify and self.cache != "exact":
            raise BadExit(
                f"{argument('verify')} needs the full model's keys and values, but {argument('cache')} is "
                f"{self.cache!r}; use {argument('cache', 'exact')}"
            )
        if self.max_draft_tokens is not None and self.max_draft_tokens < 1:
            raise BadExit(f"{argument('max_draft_tokens')} must be 1 or more, got {self.max_draft_tokens}")
        if self.drafts is not None and not self.verify:
            raise BadExit(f"{argument('drafts')} need {argument('verify')}; turn it on, or leave out the drafts")
        self._config = ExitConfig.of(self.exit)
        self._draft_config = self._choose_drafters()

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Generate; `model.generate` calls this after its own preparations."""
        if self.model is None or self.model.hf is not model:
            self.use_model(Model.wrap(model))
        assert self.model is not None
        config, max_length = generation_config, stopping_criteria.max_length
        _check_call(self.model, input_ids.shape[1], max_length, config, model_kwargs)
        eos, pad = config._eos_token_tensor, config._pad_token_tensor
        sequences = Sequences(
            input_ids,
            stopping_criteria,
            pad=None if pad is None else int(pad),
            eos_tokens=frozenset() if eos is None else frozenset(eos.reshape(-1).tolist()),
            streamer=self.streamer,
        )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and bool(mask.all()):
            mask = None  # attention without a mask is faster
        require_exits(self.model, padded=mask is not None)
        positions = model_kwargs.get("position_ids")
        if positions is None:  # families without a position_ids argument
            positions = prompt_positions(self.model, input_ids, mask)
        runner = BlockRunner(self.model, choose_blocks(self.model), mask, positions)
        do_sample = bool(config.do_sample)
        decoder = Decoder(
            self.model, self.jumps, self._config, runner, sequences, logits_processor, do_sample=do_sample
        )
        if self.verify:
            decoder.decode_verified(self._start_drafting(decoder), max_length)
        else:
            decoder.decode(self.cache)
        self.result = _result(self.model, sequences, decoder.counts)
        ids = sequences.padded(sequences.width)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]
        return ids

    def _choose_drafters(self) -> DraftConfig:
        """The drafters that were asked for, that calibration chose, or that need no fitting."""
        config = self.drafts if self.drafts is not None else self._config.drafts
        if config is not None:
            draft_config = DraftConfig.of(config)
        elif isinstance(self._config.rule, Never):
            draft_config = DraftConfig()
        else:  # the rule alone decides
            draft_config = DraftConfig(("exit",), MAX_EXIT_DRAFTS, costs=FREE)
        if "exit" in draft_config.drafters and isinstance(self._config.rule, Never):
            if draft_config.drafters == ("exit",):
                raise BadExit(
                    f"the drafter exit needs an exit rule, got {argument('exit', 'never')}; give one, such as gap:0.9"
                )
            others: tuple[DrafterName, ...] = tuple(name for name in draft_config.drafters if name != "exit")
            draft_config = replace(draft_config, drafters=others)
        if self.max_draft_tokens is not None:
            draft_config = replace(draft_config, max_tokens=self.max_draft_tokens)
        return draft_config

    def _start_drafting(self, decoder: Decoder) -> Drafting:
        """The drafters of one generation, the cheapest first."""
        assert self.model is not None
        config, rows = self._draft_config, len(decoder.sequences.ids)
        drafters: list[Drafter] = config.make_drafters(self.model, self.jumps, decoder.runner)
        if "exit" in config.drafters:
            drafters.append(ExitDrafter(decoder))
        # Calibrated costs are those of a single row.
        costs = config.costs if config.costs is not None and (rows == 1 or config.costs is FREE) else None
        return Drafting(
            drafters,
            step_costs(self.model, rows) if costs is None else costs,
            max_tokens=config.max_tokens,
            priors=config.priors,
            min_acceptance=self._config.min_acceptance,
        )

    def use_model(self, model: Model) -> None:
        """Take a model for the next calls; refuse one that cannot decode with these settings."""
        if model.task != "causal":
            raise BadExit(f"early exit needs a causal language model, but {model.name} is a {model.task} model")
        model.require_predictions()
        checked_levels(self._config.rule, model.n_blocks)
        if self._config.shortlist is not None:
            self._config.shortlist.check(model)
        if "head" in self._draft_config.drafters:
            self._draft_config.find_head(self.jumps)
            if self._draft_config.head_shortlist is not None:
                self._draft_config.head_shortlist.check(model)
        if "splice" in self._draft_config.drafters:
            self._draft_config.find_splice(self.jumps)
        if self.jumps is not None:
            check_model(self.jumps, model, allow_other_weights=self.jumps.used_on is not None)
            self.jumps.to(model.device)
        require_exits(model)
        self.model = model


early_exit = EarlyExit


def check_ranges(generation: Mapping[str, Any]) -> None:
    """Refuse values out of range among the keywords of `model.generate`."""
    new_tokens, temperature, top_p = (generation.get(name) for name in ("max_new_tokens", "temperature", "top_p"))
    if new_tokens is not None and new_tokens < 1:
        raise BadExit(f"{argument('max_new_tokens')} must be 1 or more, got {new_tokens}")
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise BadExit(f"{argument('temperature')} must be more than 0, got {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise BadExit(f"{argument('top_p')} must be more than 0 and at most 1, got {top_p:g}")


def _check_call(
    model: Model, prompt_length: int, max_length: int, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> None:
    """Refuse settings of `model.generate` that early exit does not support, and more tokens than fit."""
    cache = model_kwargs.get("past_key_values")
    outputs = ("scores", "logits", "attentions", "hidden_states")
    unsupported = {
        f"num_beams={config.num_beams}; use 1": (config.num_beams or 1) > 1,
        "use_cache=False; leave it on": not model_kwargs.get("use_cache", True),
        "inputs_embeds; give input_ids": model_kwargs.get("inputs_embeds") is not None,
        f"cache_implementation={config.cache_implementation!r}; leave it out, because it has a KV cache of its own": (
            config.cache_implementation not in (None, "dynamic")
        ),
        f"past_key_values of the type {type(cache).__name__}; give none, because it has a KV cache of its own": (
            cache is not None and (not isinstance(cache, DynamicCache) or cache.offloading)
        ),
        "past_key_values that hold tokens; give none": cache is not None and int(cache.get_seq_length()) > 0,
        f"output_{', output_'.join(outputs)}; it returns tokens alone": any(
            getattr(config, f"output_{name}") for name in outputs
        ),
    }
    for setting, is_used in unsupported.items():
        if is_used:
            raise BadExit(f"early exit does not support {setting}")
    # Only a table of learned positions ends; families that compute positions may run past their maximum.
    tables = [module for module in model.stack.modules() if isinstance(module, nn.Embedding)]
    learned = any(table is not model.hf.get_input_embeddings() for table in tables)
    if learned and max_length > model.max_positions:
        raise BadExit(
            f"{max_length - prompt_length:,} new tokens do not fit: {model.name} has {model.max_positions:,} "
            f"positions, and the prompt takes {prompt_length:,}; lower {argument('max_new_tokens')} or shorten it"
        )


def _result(model: Model, sequences: Sequences, counts: Counts) -> Generated:
    texts, new_ids, exit_levels, drafters = [], [], [], []
    for row, prompt in enumerate(sequences.ids[:, : sequences.prompt_length].tolist()):
        new = sequences.new_tokens(row)
        new_ids.append(new)
        columns = range(len(prompt), len(prompt) + len(new))
        exit_levels.append([sequences.exit_levels[row][column] for column in columns])
        drafters.append([sequences.drafters[row].get(column) for column in columns])
        # The text that the new tokens add to the prompt. Decoded alone, some tokenizers would drop their first blank.
        text = ""
        if model.tokenizer is not None:
            before, full, text = (
                str(model.tokenizer.decode(ids, skip_special_tokens=True)) for ids in (prompt, prompt + new, new)
            )
            text = full[len(before) :] if full.startswith(before) else text
        texts.append(text)
    tokens = [] if model.tokenizer is None else [model.token_texts(ids) for ids in new_ids]
    return Generated(texts, new_ids, exit_levels, drafters, model.n_blocks, counts, tokens)
