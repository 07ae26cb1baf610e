"""The second axis of the leaderboard: does the model use what a lens reads?

- `swap`: how often exchanging the lens' directions of the model's top token and of another token at one level and
  position makes the model say the other one; and the KL that this adds among all other tokens.
- `alignment`: stimulus–response alignment: cosine of the changes of the lens' and of the model's output after the same
  change of the state.
- `hidden`: how often the lens reads the intermediate of a question in two steps, which the text never states.
- `cosine`: cosine of the lens' token directions with those of the Jacobian lens, whose own row is the ceiling: the
  cosine that its noise allows, from two halves of the text. The same of the matrices of `mat` and the Jacobian lens,
  with the ceiling of both: how far the rest of the network is from affine.

Numbers are means over levels, with 95 % bootstrap intervals over items (prompts; countries for `hidden`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import layerjump as lj
from layerjump.data.batches import Batch
from layerjump.interventions.causal_tests import Response, measure_alignment, measure_response, measure_swaps
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.lens.token_direction import token_directions
from layerjump.metrics.bootstrap import mean_interval
from leaderboard.causal_lenses import LENSES, CausalLenses, cosine, weight
from leaderboard.two_hop import Item, answered, best_rank, items

LENGTH = 16
"""Tokens of a prompt; its last position is changed."""
STIMULI = 2
"""Changes of each prompt's state at each level."""
Interval = list[float]
"""Mean, lower and upper end."""


@dataclass(frozen=True)
class CausalScores:
    """One lens on the causal axis."""

    swap: Interval
    disturbance: Interval
    alignment: Interval
    hidden: Interval | None
    """Share of questions whose intermediate is the top token at some level and position; None without questions."""
    hidden_among_ten: Interval | None
    chance_among_ten: Interval | None
    """The same for the country of another question."""
    cosine: Interval
    by_level: dict[int, dict[str, float]]


@dataclass(frozen=True)
class CausalBoard:
    """All lenses of a model, and what they were measured on."""

    lenses: dict[str, CausalScores]
    levels: tuple[int, ...]
    prompts: int
    questions: int
    answered: int
    matrices: dict[int, dict[str, float]]
    """Level → `cosine` of mat and Jacobian, and `ceiling`, which the noise of both allows, from halves of the text."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def short(self) -> dict[str, dict[str, float | None]]:
        """Lens → means, for the last line of a run."""
        names = ("swap", "disturbance", "alignment", "hidden", "cosine")
        return {lens: {name: _mean(getattr(scores, name)) for name in names} for lens, scores in self.lenses.items()}


def _mean(interval: Interval | None) -> float | None:
    return None if interval is None else round(interval[0], 4)


def causal_board(fitter: CausalLenses, n_prompts: int, *, n_questions: int | None = None) -> CausalBoard:
    """Measure every lens of a model."""
    model, levels = fitter.model, fitter.levels
    lenses = {name: fitter.lens(name) for name in LENSES}
    rerun = Rerun(model, held_out_prompts(model, fitter.corpus, n_prompts))
    questions = items()[:n_questions]
    answered_questions = answered(model, questions)
    ranks = _rank_intermediates(lenses, levels, answered_questions)
    responses = {level: [measure_response(rerun, level, seed=seed) for seed in range(STIMULI)] for level in levels}
    scores = {}
    for name, lens in lenses.items():
        cells = {level: _measure(lens, rerun, level, responses[level]) for level in levels}
        for level, cell in cells.items():
            if name == "jacobian":
                first, second = (lj.Lens(model, half) for half in fitter.jacobian_halves)
                cell["cosine"] = reliability(_direction_cosines(first, second, rerun, level)).sqrt()
            else:
                cell["cosine"] = _direction_cosines(lens, lenses["jacobian"], rerun, level)
        means = {key: torch.stack([cells[level][key] for level in levels]).mean(0) for key in cells[levels[0]]}
        by_level = {level: {key: float(values.mean()) for key, values in cells[level].items()} for level in levels}
        intervals: dict[str, Any] = {key: _interval(values.numpy()) for key, values in means.items()}
        scores[name] = CausalScores(**intervals, **_score_questions(ranks[name], answered_questions), by_level=by_level)
        print(f"  {_row(name, scores[name])}", flush=True)
    return CausalBoard(
        scores, levels, len(rerun.batch.row), len(questions), len(answered_questions), _compare_matrices(fitter)
    )


def held_out_prompts(model: lj.Model, corpus: lj.Corpus, n: int) -> Batch:
    """The first tokens of n test documents, all equally long; the last position of each is picked."""
    rows: list[list[int]] = []
    documents: list[int] = []
    for document in lj.split_indices(len(corpus.documents)).test:
        ids = model.tokenization.wrap_prompt(model.tokenization.encode([corpus.documents[document]])[0])
        if len(ids) >= LENGTH and len(rows) < n:
            rows.append(ids[:LENGTH])
            documents.append(document)
    tokens = torch.tensor(rows)
    row = torch.arange(len(tokens))
    position = torch.full_like(row, LENGTH - 1)
    return Batch(tokens, torch.ones_like(tokens), row, position, torch.tensor(documents), tokens[:, -1])


@torch.no_grad()
def _measure(lens: lj.Lens, rerun: Rerun, level: int, responses: list[Response]) -> dict[str, Tensor]:
    """What changed states tell of a lens at a level, one value for each prompt."""
    swaps = measure_swaps(lens, rerun, level, _other_tokens(_top_tokens(rerun)))
    aligned = [measure_alignment(lens, response) for response in responses]
    return {
        "swap": swaps.success.double(),
        "disturbance": swaps.disturbance.double(),
        "alignment": torch.stack(aligned).mean(0).double(),
    }


def _direction_cosines(one: lj.Lens, other: lj.Lens, rerun: Rerun, level: int) -> Tensor:
    """For each prompt the cosine of two lenses' directions of the model's top token."""
    top, states = _top_tokens(rerun), rerun.pick(rerun.levels[level])
    both = [token_directions(lens.model, lens.readout(level), top, states) for lens in (one, other)]
    return (both[0] * both[1]).sum(-1).expand(len(top))


def reliability(halves: Tensor) -> Tensor:
    """The squared cosine of an estimate with the truth, from that of the estimates of two halves (Spearman–Brown)."""
    halves = halves.clamp_min(0)
    return 2 * halves / (1 + halves)


def _top_tokens(rerun: Rerun) -> Tensor:
    return rerun.model.logits(rerun.pick(rerun.levels[-1])).argmax(-1)


def _other_tokens(top: Tensor) -> Tensor:
    """For each prompt the top token of the next prompt that has another one."""
    others = []
    for index, token in enumerate(top.tolist()):
        following = [*top[index + 1 :].tolist(), *top[:index].tolist()]
        others.append(next(other for other in following if other != token))
    return torch.tensor(others)


def _rank_intermediates(
    lenses: dict[str, lj.Lens], levels: tuple[int, ...], kept: list[Item]
) -> dict[str, list[tuple[int, int]]]:
    """For each lens and question the best rank of its country, and of the country of another question."""
    ranks: dict[str, list[tuple[int, int]]] = {name: [] for name in lenses}
    for index, item in enumerate(kept):
        following = [*kept[index + 1 :], *kept[:index]]
        other = next((one.intermediate for one in following if one.intermediate != item.intermediate), None)
        if other is None:
            continue
        for name, both in best_rank(lenses, levels, item, [item.intermediate, other]).items():
            own, chance = both.tolist()
            ranks[name].append((own, chance))
    return ranks


def _score_questions(ranks: list[tuple[int, int]], kept: list[Item]) -> dict[str, Any]:
    """Shares of questions with intervals over countries, whose questions resemble each other."""
    names = ("hidden", "hidden_among_ten", "chance_among_ten")
    if not ranks:
        return dict.fromkeys(names)
    own, chance = np.array(ranks).T
    countries = [item.intermediate for item in kept]
    return {
        name: _interval(hits, countries) for name, hits in zip(names, (own < 1, own < 10, chance < 10), strict=True)
    }


def _interval(values: Any, groups: list[str] | None = None) -> Interval:
    return [float(end) for end in mean_interval(values, np.arange(len(values)) if groups is None else groups)]


def _compare_matrices(fitter: CausalLenses) -> dict[int, dict[str, float]]:
    """cos(J, A) at each level: 1 if the rest of the network is affine, up to the noise of both estimates."""
    last, mat, jacobian = fitter.model.n_blocks, fitter.lens("mat").jumps, fitter.lens("jacobian").jumps
    assert mat is not None
    assert jacobian is not None
    compared = {}
    for level in fitter.levels:
        halves = torch.tensor(
            [
                cosine(*(weight(half, level, last) for half in pair))
                for pair in (fitter.mat_halves, fitter.jacobian_halves)
            ]
        )
        compared[level] = {
            "cosine": cosine(weight(mat, level, last), weight(jacobian, level, last)),
            "ceiling": float(reliability(halves).prod().sqrt()),
        }
    return compared


def causal_table(board: CausalBoard) -> str:
    """The board as Markdown, with intervals."""
    questions = f"{board.answered} of {board.questions} questions"
    rows = [
        ["lens", "swap success", "disturbance", "alignment", f"hidden @1 ({questions})", "@10", "chance @10", "cosine"]
    ]
    rows.append(["---"] * len(rows[0]))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, *(_row(name, scores) for name, scores in board.lenses.items())])


def _row(name: str, scores: CausalScores) -> str:
    columns = (
        scores.swap,
        scores.disturbance,
        scores.alignment,
        scores.hidden,
        scores.hidden_among_ten,
        scores.chance_among_ten,
        scores.cosine,
    )
    return "| " + " | ".join([name, *map(_cell, columns)]) + " |"


def _cell(interval: Interval | None) -> str:
    return "–" if interval is None else "{:.2f} ({:.2f}–{:.2f})".format(*interval)


def matrix_line(board: CausalBoard) -> str:
    """cos(J, A) of every level in one line."""
    cells = (f"level {level}: {row['cosine']:.2f} of {row['ceiling']:.2f}" for level, row in board.matrices.items())
    return f"cos(J, A), of its split-half ceiling: {'; '.join(cells)}"
