"""Lens: hidden states at any site of a model to logits, through a jump and the model's own unembedding.

lens = Lens(model, jumps)             # without jumps: the logit lens
lens = Lens.from_pretrained("smollm2")     # jumps of the package, the cache or the hub
trajectory = lens("The capital of")   # every position at every level
lens("<image> What is it?", images=[image])  # an image–text model with a processor
lens.between(5, 20)("The capital of")      # level 5 mapped to level 20, then decoded from there
lens.direction(" Paris", 20)          # the direction at level 20 that the lens decodes as " Paris"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from layerjump.data.batches import Batch
from layerjump.data.chat import Message, is_chat, warn_of_plain_text
from layerjump.errors import BadJumps, BadModel, BadText, LayerjumpError, argument, one_line
from layerjump.jumps.default_jumps import load_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.lens.prepare_prompt import (
    BATCH_TOKENS,
    Prompt,
    as_list,
    chat_prompt,
    continue_prompt,
    process_images,
    prompt_from_inputs,
    tokenize_prompts,
)
from layerjump.lens.readout import LensQuery, PromptStates, Readout, compute_stats
from layerjump.lens.token_direction import token_direction
from layerjump.lens.trajectory import Trajectory
from layerjump.models.loading import load
from layerjump.models.model import Model, capture_states, require_model
from layerjump.models.sites import FINAL, JointSource, Pair, Site, Term

SiteName = Site | str | int
Sites = Sequence[SiteName]
Tokens = Sequence[str | int]
"""Tokens by their ids, or by texts that are one token each."""
Texts = list[str] | tuple[str, ...]


@dataclass(frozen=True)
class Lens:
    """Decodes any level of a model. Without jumps it is the logit lens: final norm and unembedding of the raw state."""

    model: Model
    jumps: Jumps | None = None

    def __post_init__(self) -> None:
        require_model(self.model)
        self.model.require_predictions()
        if self.jumps is None:
            return
        fitted = self.jumps.provenance
        if (fitted.n_blocks, fitted.width) != (self.model.n_blocks, self.model.d_model):
            raise BadJumps(
                f"expected jumps of {self.model}, got {self.jumps}, fitted on a model with {fitted.n_blocks} blocks "
                f"and d_model {fitted.width}; fit jumps on this model, or pass the model they were fitted on"
            )

    @classmethod
    def from_pretrained(cls, model: Model | str) -> Lens:
        """Return a lens of a model that needs no fitting; the name of a model loads it first.

        Its jumps are those that the package brings (`smollm2`), in the cache of default jumps, or on the hub as
        `layerjump/<model>`. Raises `JumpsNotFound`, which says how to fit some.
        """
        loaded = load(model) if isinstance(model, str) else model
        return cls(loaded, load_jumps(loaded))

    @overload
    def __call__(
        self,
        text: str,
        k: int = 10,
        levels: Sites | None = None,
        tokens: Tokens = (),
        jensen_shannon: bool = False,
        *,
        images: Any = None,
        new_tokens: int = 0,
    ) -> Trajectory: ...

    @overload
    def __call__(
        self,
        text: Texts,
        k: int = 10,
        levels: Sites | None = None,
        tokens: Tokens = (),
        jensen_shannon: bool = False,
        *,
        images: Sequence[Any] | None = None,
        new_tokens: int = 0,
    ) -> list[Trajectory]: ...

    @overload
    def __call__(
        self,
        text: list[Message],
        k: int = 10,
        levels: Sites | None = None,
        tokens: Tokens = (),
        jensen_shannon: bool = False,
        *,
        new_tokens: int = 0,
    ) -> Trajectory: ...

    @overload
    def __call__(
        self,
        text: None = None,
        k: int = 10,
        levels: Sites | None = None,
        tokens: Tokens = (),
        jensen_shannon: bool = False,
        *,
        inputs: Mapping[str, Any],
        new_tokens: int = 0,
    ) -> Trajectory: ...

    @torch.no_grad()
    def __call__(
        self,
        text: str | Texts | list[Message] | None = None,
        k: int = 10,
        levels: Sites | None = None,
        tokens: Tokens = (),
        jensen_shannon: bool = False,
        *,
        images: Any = None,
        inputs: Mapping[str, Any] | None = None,
        new_tokens: int = 0,
    ) -> Trajectory | list[Trajectory]:
        """Return the trajectory of a text, or a list with one for each of several texts.

        A chat is a list of messages, `[{"role": "user", "content": "Hello"}]`; the model's chat template renders it.
        The encoder of an encoder–decoder reads the text, and the lens reads its decoder. With `new_tokens`, the model
        continues the text greedily by up to this many tokens, and the lens reads them as well.

        It holds the `k` most probable tokens, entropy, KL and more at every position and level. `levels` selects
        levels or other sites (default: all levels that have a jump). `tokens` are tracked: their probability and
        rank are recorded too. `jensen_shannon` adds the Jensen–Shannon divergence from the model.

        `images` are those of the text, in order: PIL images or arrays, for a model with a processor. For several
        texts, a list with the images of each. Instead of a text, `inputs` are the arguments of the model's `forward`
        for one text: `input_ids` and, say, `pixel_values`.
        """
        reading = _Reading.of({self.name: self}, k, levels, tokens, jensen_shannon)
        if inputs is not None:
            if text is not None or images is not None:
                raise BadText(f"expected {argument('inputs')} alone, got them with a text or images; pass either")
            (trajectories,) = reading.read([prompt_from_inputs(self.model, inputs)], new_tokens)
            return trajectories[self.name]
        if text is None:
            raise BadText(f"expected {argument('text')} or {argument('inputs')}, got neither")
        if is_chat(text):
            (trajectories,) = reading.read([chat_prompt(self.model, cast(list[Message], text))], new_tokens)
            return trajectories[self.name]
        texts = [text] if isinstance(text, str) else cast(list[str], text)
        if images is None:
            prompts = tokenize_prompts(self.model, texts)
        else:
            prompts = process_images(self.model, texts, [images] if isinstance(text, str) else as_list(images))
        by_text = [trajectories[self.name] for trajectories in reading.read(prompts, new_tokens)]
        warn_of_plain_text(self.model.name, self.model.tokenizer, texts, stacklevel=3)
        return by_text[0] if isinstance(text, str) else by_text

    @property
    def name(self) -> str:
        """The estimator of the jumps, or `identity`."""
        return "identity" if self.jumps is None else self.jumps.provenance.estimator

    @property
    def first_fitted_position(self) -> int:
        """The first position that the jumps were fitted on; 0 without jumps."""
        return 0 if self.jumps is None else self.jumps.provenance.skip_first

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that this lens can decode; a foreign lens, or a selection of pairs, may lack some."""
        return tuple(site.index for site in self.default_sites if site.part == "level")

    @property
    def default_sites(self) -> tuple[Site, ...]:
        """The sites of a trajectory for which no levels are selected: every level that the lens can decode."""
        last, jumps = Site(self.model.n_blocks), self.jumps
        levels = [Site(level) for level in range(self.model.n_blocks)]
        if jumps is None:
            return (*levels, last)
        levels = [level for level in levels if self._find_pair(level) is not None]
        if not levels:
            raise BadJumps(
                f"{jumps} has no jump from a level to the last level or to `final`, so no level can be decoded; fit "
                f"with {argument('pairs', 'to-last')}"
            )
        return (*levels, last)

    def readout(self, site: SiteName) -> Readout:
        """How this lens decodes a site: through a jump to level L, through a jump to `final`, or without a map.

        Level L and `final` need no jump. Without jumps, every site of width d_model is decoded as if it were level L.
        A jump that reads earlier positions too, such as `final@-1+5` for level 5, makes a lens with memory: the site
        of the readout is then that joint source.
        """
        site, last = Site.parse(site), Site(self.model.n_blocks)
        structure, jumps = self.model.structure, self.jumps
        structure.tap(site)  # raises if the model has no such site
        if site == FINAL:
            return Readout(structure, site, needs_final_norm=False)
        if site == last or jumps is None:
            return Readout(structure, site)
        pair = self._find_pair(site)
        if pair is not None:
            source, target = pair
            return Readout(structure, source, (jumps[source, target],), needs_final_norm=target == last)
        is_level = site.part == "level"
        pairs = argument("pairs", "to-last" if is_level else f"{site}:{last}")
        raise BadJumps(
            f"{jumps} has no jump from {'level ' if is_level else ''}{site} to the last level or to `final`, so the "
            f"lens cannot decode it; fit with {pairs}"
        )

    def _find_pair(self, site: Site) -> Pair | None:
        """The jump that decodes a site: from the site alone, else from the site and earlier positions."""
        assert self.jumps is not None
        targets = (Site(self.model.n_blocks), FINAL)
        for target in targets:
            if (site, target) in self.jumps:
                return site, target
        joint = [
            (source, target)
            for source, target in self.jumps
            if isinstance(source, JointSource)
            and target in targets
            and [term for term in source.terms if not term.offset] == [Term(site, 0)]
        ]
        return min(joint, key=lambda pair: targets.index(pair[1]), default=None)

    def logits(self, site: SiteName, states: Tensor) -> Tensor:
        """Logits of hidden states at a site; at level L they are the model's own."""
        return self.readout(site).logits(states)

    def between(self, source: SiteName, target: SiteName) -> CrossLevelLens:
        """A lens that maps one site to another and decodes the result as this lens decodes the target.

        It shows what level i already holds of level j. With the last level as the target it equals this lens.
        """
        return CrossLevelLens(self.model, self.jumps, source=Site.parse(source), target=Site.parse(target))

    def direction(self, token: str | int, site: SiteName, states: Tensor | None = None) -> Tensor:
        """The unit vector (d,) at a site along which the lens' logit of a token grows.

        With `states` (…, d), one vector for each. Jumps that read more than the raw state, such as `calibrated` ones,
        have no direction without states.
        """
        return token_direction(self.model, self.readout(site), token, states)


@dataclass(frozen=True, kw_only=True)
class CrossLevelLens(Lens):
    """A lens that decodes one site as another; `Lens.between` makes it."""

    source: Site
    target: Site

    @property
    def name(self) -> str:
        return f"{super().name} {self.source}→{self.target}"

    @property
    def default_sites(self) -> tuple[Site, ...]:
        return (self.source,)

    def readout(self, site: SiteName) -> Readout:
        """How the source is decoded: mapped to the target, and from there as a plain lens does."""
        if Site.parse(site) != self.source:
            raise BadJumps(f"this lens decodes {self.source} only, got {site}; use the lens itself")
        if self.target == Site(self.model.n_blocks):
            return super().readout(self.source)
        readout = super().readout(self.target)
        return replace(readout, site=self.source, maps=(*self._maps(), *readout.maps))

    def map_states(self, states: Tensor) -> Tensor:
        """Hidden states at the source mapped to the target."""
        for jump in self._maps():
            states = apply_map(jump, states)
        return states

    def _maps(self) -> tuple[nn.Module, ...]:
        """The jump from the source to the target; none without jumps, or if the two are the same."""
        if self.jumps is None or self.source == self.target:
            return ()
        if (self.source, self.target) in self.jumps:
            return (self.jumps[self.source, self.target],)
        pairs = [(self.source, self.target), (self.target, Site(self.model.n_blocks))]
        missing = ",".join(f"{a}:{b}" for a, b in pairs if a != b)
        raise BadJumps(f"{self.jumps} has no jump {self.source} → {self.target}; fit with {argument('pairs', missing)}")


@torch.no_grad()
def read_trajectories(
    lenses: Mapping[str, Lens],
    texts: Sequence[str | list[Message]],
    *,
    k: int = 10,
    levels: Sites | None = None,
    tokens: Tokens = (),
    jensen_shannon: bool = False,
    last: int | None = None,
    new_tokens: int = 0,
) -> list[dict[str, Trajectory]]:
    """For each text or chat, the trajectory of every lens by name. Lenses of one model share its forward passes.

    The options are those of `Lens.__call__`. `last` reads only this many positions, the last ones of each text; the
    model still runs the whole text. Without `levels`, the levels are those that every lens can decode.
    """
    reading = _Reading.of(lenses, k, levels, tokens, jensen_shannon)
    model = reading.model
    prompts = [
        tokenize_prompts(model, [text], last)[0] if isinstance(text, str) else chat_prompt(model, text, last)
        for text in texts
    ]
    return reading.read(prompts, new_tokens)


@dataclass(frozen=True)
class _Reading:
    """What to read of prompts through several lenses of one model."""

    model: Model
    lenses: Mapping[str, Lens]
    sites: tuple[Site, ...]
    readouts: Mapping[str, tuple[Readout, ...]]
    query: LensQuery

    @classmethod
    def of(
        cls, lenses: Mapping[str, Lens], k: int, levels: Sites | None, tokens: Tokens, jensen_shannon: bool
    ) -> _Reading:
        if k < 1:
            raise BadText(f"expected {argument('k')} of 1 or more, got {k}")
        model = next(iter(lenses.values())).model
        if levels is None:
            sites = tuple(sorted(set.intersection(*(set(lens.default_sites) for lens in lenses.values()))))
        else:
            sites = tuple(dict.fromkeys(Site.parse(site) for site in levels))
        if not sites:
            raise BadText(f"expected at least one level in {argument('levels')}, got none")
        # Before the model runs, so that a site that cannot be decoded is an error at once.
        readouts = {name: tuple(lens.readout(site) for site in sites) for name, lens in lenses.items()}
        tracked = tuple(dict.fromkeys(model.prediction_id(token) for token in tokens))
        query = LensQuery(min(k, model.structure.vocab_size), tracked, jensen_shannon)
        return cls(model, lenses, sites, readouts, query)

    def read(self, prompts: Sequence[Prompt], new_tokens: int = 0) -> list[dict[str, Trajectory]]:
        prompts = [continue_prompt(self.model, prompt, new_tokens) for prompt in prompts]
        trajectories: list[dict[str, Trajectory]] = [{} for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
        while order:
            # Prompts of similar length run together; one with inputs of its own runs alone.
            size = 1
            while (
                size < len(order)
                and (size + 1) * len(prompts[order[size]].ids) <= BATCH_TOKENS
                and all(prompts[index].inputs is None for index in order[: size + 1])
            ):
                size += 1
            indices, order = order[:size], order[size:]
            for index, states in zip(indices, self._run([prompts[index] for index in indices]), strict=True):
                model_top, stats = compute_stats(self.model, self.readouts, states, self.query)
                for name, lens in self.lenses.items():
                    trajectories[index][name] = Trajectory(
                        model=self.model,
                        name=name,
                        first_fitted_position=lens.first_fitted_position,
                        readouts=self.readouts[name],
                        prompt=prompts[index],
                        states=states,
                        query=self.query,
                        model_top=model_top,
                        stats=stats[name],
                    )
        return trajectories

    def _run(self, prompts: list[Prompt]) -> list[PromptStates]:
        """The states of prompts that run together, in a batch whose picks are the positions to read."""
        model, last_level = self.model, Site(self.model.n_blocks)
        rows = [torch.tensor(prompt.ids) for prompt in prompts]
        pad = model.tokenization.pad if len(rows) > 1 else 0
        ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        counts = [len(prompt.positions) for prompt in prompts]
        row = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts))
        position = torch.tensor([position for prompt in prompts for position in prompt.positions])
        batch = Batch(ids, mask, row, position, row, ids[row, position], extra_inputs=prompts[0].inputs)
        try:
            joint = self._joint_sources()
            (captured,) = capture_states(model, [batch], [*self.sites, last_level, *joint])
        except LayerjumpError:
            raise
        except Exception as error:
            if batch.extra_inputs is None:
                raise
            raise BadModel(
                f"{model.name} does not run with the inputs {', '.join(batch.extra_inputs)}: {type(error).__name__}: "
                f"{one_line(error)}; pass what its forward takes"
            ) from error
        by_prompt = zip(*(captured[site].split(counts) for site in (*self.sites, last_level, *joint)), strict=True)
        n_sites = len(self.sites)
        return [
            PromptStates(
                self.sites,
                tuple(states[:n_sites]),
                states[n_sites],
                _targets(model, prompt),
                dict(zip(joint, states[n_sites + 1 :], strict=True)),
            )
            for prompt, states in zip(prompts, by_prompt, strict=True)
        ]

    def _joint_sources(self) -> list[Site]:
        """The joint sources that lenses with memory read."""
        sources = (readout.site for readouts in self.readouts.values() for readout in readouts)
        return list(dict.fromkeys(source for source in sources if isinstance(source, JointSource)))


def _targets(model: Model, prompt: Prompt) -> Tensor:
    """The next token at each position that is read; −1 where there is none, or a placeholder of an image."""
    following = [-1] * len(prompt.ids)
    if model.causal:
        images = set(prompt.image_positions)
        following = [-1 if i + 1 in images else token for i, token in enumerate(prompt.ids[1:])] + [-1]
    return torch.tensor(following)[list(prompt.positions)]
