"""Replay drafts on text that the model wrote: which drafters pay, how many tokens to draft, and what to expect.

The replay runs the drafters and their combination as generation does, on known text and known final states, without
the model. A step costs what was measured for its number of columns, and the drafters their own time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from layerjump.generation.block_runner import DraftCounts
from layerjump.generation.calibration.fit_drafters import Continuation
from layerjump.generation.combine_drafters import FREE, PRIORS, DraftConfig, DrafterName, Drafting, StepCosts
from layerjump.generation.drafters import DraftContext
from layerjump.models.model import Model

_LENGTHS = (4, 2, 8)  # numbers of drafts in a step that are tried; drafters are chosen with the first
_MIN_SEEN = 8  # proposals with the same evidence from which their share of right ones is a prior


@dataclass
class DraftReplay:
    """What drafts would have done on a text."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Verification steps at their measured costs, and the drafters' own time."""
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    tally: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """(drafter, evidence) → right and all proposals whose answer became known."""

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(1, self.tokens)


def replay(model: Model, config: DraftConfig, costs: StepCosts, text: Sequence[Continuation]) -> DraftReplay:
    """Draft every continuation from its second token on; a step with no draft gives one token."""
    result = DraftReplay()
    for part in text:
        drafting = Drafting(
            config.make_drafters(model, None, None), costs, max_tokens=config.max_tokens, priors=config.priors
        )
        length = part.n_opening + 1
        drafting.observe(part.tokens[: part.n_opening], part.tokens[part.n_opening : part.n_opening + 1])
        while length < len(part.tokens):
            index = length - 1 - part.n_opening
            states = {site: rows[index][None].to(model.device) for site, rows in part.states.items()}
            context = DraftContext([part.tokens[:length]], [length], states)
            drafts, chance = [], 1.0
            drafting.begin_step()
            for column in range(length, min(length + config.max_tokens, len(part.tokens) - 1)):
                choices = drafting.choose(context, column, {0: chance}, column - length + 1)
                if not choices:
                    break
                drafts.append(choices[0])
                chance = choices[0].chance
                context.tokens[0].append(choices[0].proposal.token)
            result.seconds += costs.of(len(drafts) + 1)
            truth = part.tokens[length : length + len(drafts)]
            right = [choice.proposal.token == token for choice, token in zip(drafts, truth, strict=True)]
            n_right = right.index(False) if False in right else len(right)
            for depth, choice in enumerate(drafts[: n_right + 1]):
                result.drafters.setdefault(choice.drafter, DraftCounts()).add(depth, right[depth])
            end = length + n_right + 1
            drafting.learn([part.tokens], [length], [end], right[: n_right + 1])
            drafting.observe(part.tokens[: end - 1], part.tokens[length:end])
            result.tokens += end - length
            result.steps += 1
            length = end
        result.seconds += drafting.seconds_asked
        for key, (hits, total) in drafting.tally.items():
            before = result.tally.get(key, (0, 0))
            result.tally[key] = before[0] + hits, before[1] + total
    return result


def measure_priors(
    model: Model, config: DraftConfig, text: Sequence[Continuation]
) -> Mapping[str, Mapping[int, float]]:
    """The share of right proposals of every drafter by evidence, where all are asked and all drafts verified."""
    tally = replay(model, config, FREE, text).tally
    priors: dict[str, dict[int, float]] = {name: dict(PRIORS.get(name, {})) for name in config.drafters}
    for (drafter, evidence), (right, total) in tally.items():
        if total >= _MIN_SEEN:
            priors[drafter][evidence] = right / total
    return priors


def choose_drafters(
    model: Model,
    config: DraftConfig,
    costs: StepCosts,
    text: Sequence[Continuation],
    choices: Sequence[tuple[DrafterName, ...]],
) -> tuple[DraftConfig, DraftReplay]:
    """The drafters, then the number of drafts, with which a token costs least."""

    def try_out(drafters: tuple[DrafterName, ...], max_tokens: int) -> tuple[DraftConfig, DraftReplay]:
        tried = replace(config, drafters=drafters, max_tokens=max_tokens)
        return tried, replay(model, tried, costs, text)

    def cost(tried: tuple[DraftConfig, DraftReplay]) -> float:
        return tried[1].seconds_per_token

    first, *others = _LENGTHS
    best = min((try_out(drafters, first) for drafters in choices), key=cost)
    return min([best, *(try_out(best[0].drafters, length) for length in others)], key=cost)
