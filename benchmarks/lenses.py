"""The leaderboard of lenses: ours beside tuned-lens and TransformerLens' Jacobian lens, by quality and by cost.

    python benchmarks/lenses.py [--models smollm2,stories15m,rxn-bert] [--lenses mat,calibrated,…] [--tokens 60000]
                                [--peers FOLDER] [--record] [-o lenses] [--quick]

One text a board, split by documents: every lens is fitted on the same fit documents, whatever it chooses it chooses on
the select documents, and all are scored by the same code on the same positions of test documents: KL from the model's
own output, Precision@1/5/10, Surprisal, calibration error (of its best token's probability, held against the text) and
marginal KL, averaged over levels 1 … L − 1 (a Jacobian lens has no level 0), with intervals by bootstrap over
documents. Cost: CPU seconds of the fit, and as a multiple of the bare forward pass over the fit documents in the same
run.

Peers run in environments of their own (`benchmarks/peers/setup.sh FOLDER` makes them), on the very same tokens. A tuned
lens gets the best of several ways to train, until it gains no more, and ten times the CPU of our dearest fit (but the
Jacobian's).
Without `--peers` their results come from `benchmarks/peers/recorded.json`, and are marked. All numbers go to
`lenses.json`, the figure to `lenses.html`; the last line is JSON: model → text → lens → {kl, p1, cost, ece, …}.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from leaderboard.held_out import HeldOut, held_out, own_calibration
from leaderboard.ours import OURS, Made, Workshop
from leaderboard.peers import PEERS, Budget, record, recorded, run_peers
from leaderboard.scores import Scores, difference, score
from leaderboard.show import Board, figure, table, write_page

import layerjump as lj
from layerjump.measure.timing import machine

SHARED = Path(__file__).parents[2] / "shared"
TEXTS = {
    "wikipedia": SHARED / "text/leipzig/eng_wikipedia_2016_10K-sentences.txt",
    "news": SHARED / "text/leipzig/eng_news_2020_10K-sentences.txt",
    "stories": SHARED / "text/tinystories/tinystories_train_sample.txt",
    "reactions": SHARED / "text/reactions.txt",
}
MODELS = {
    "smollm2": ("smollm2", ("wikipedia", "news")),
    "stories15m": (str(SHARED / "models/stories15M"), ("stories",)),
    "rxn-bert": (str(SHARED / "models/rxn-bert"), ("reactions",)),
    "stories260k": (str(SHARED / "models/stories260K"), ("stories",)),
}
"""Peers know no masked models, so on rxn-bert ours are ranked alone; stories260k is for trying the peers out."""
BOARDS = ("smollm2", "stories15m", "rxn-bert")
QUICK = ("stories15m",)
BUDGETS = {
    # A step costs a vocabulary product and its gradient at every level: SmolLM2's take fifteen times stories15M's.
    "smollm2": Budget(tokens_per_step=256, jacobian_tokens=1_000, skip_first=4),
    "stories15m": Budget(jacobian_tokens=6_000),
    "stories260k": Budget(steps=20, tokens_per_step=256, most_minutes=1, jacobian_tokens=400),
}
PRINTED = ("kl", "p1", "ece", "marginal_kl")


@dataclass(frozen=True)
class Settings:
    """What a run was asked for."""

    lenses: list[str]
    tokens: int
    positions: int
    quick: bool
    peers: Path | None
    record: bool
    output: Path


def main() -> None:
    options = _options()
    settings = Settings(
        lenses=options.lenses.split(","),
        tokens=4_000 if options.quick else options.tokens,
        positions=120 if options.quick else options.positions,
        quick=options.quick,
        peers=options.peers,
        record=options.record,
        output=options.output,
    )
    names = options.models.split(",") if options.models else QUICK if options.quick else BOARDS
    settings.output.mkdir(parents=True, exist_ok=True)
    print(machine())
    boards: dict[str, dict[str, Board]] = {}
    for name in names:
        source, texts = MODELS[name]
        model = lj.load(source)
        boards[name] = {text: one_board(name, model, text, settings) for text in texts}
    figures = [
        figure(name, text, board, tuple(PEERS))
        for name, by_text in boards.items()
        for text, board in by_text.items()
    ]
    write_page(figures, settings.output / "lenses.html")
    (settings.output / "lenses.json").write_text(
        json.dumps(boards, indent=1, allow_nan=False) + "\n"
    )
    print(json.dumps({name: _short(by_text) for name, by_text in boards.items()}))


def _options() -> argparse.Namespace:
    known = ",".join([*OURS, *PEERS])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--lenses", default=known, help=f"some of {known.replace(',', ', ')}")
    parser.add_argument("--tokens", type=int, default=60_000, help="of all splits together")
    parser.add_argument("--positions", type=int, default=1_000, help="scored, of each text")
    parser.add_argument("--peers", type=Path, help="the folder of the peers' environments")
    parser.add_argument("--record", action="store_true", help="keep the peers' results")
    parser.add_argument("-o", "--output", type=Path, default=Path("lenses"))
    parser.add_argument("--quick", action="store_true", help="little text: within two minutes")
    options = parser.parse_args()
    for given, wanted in ((options.lenses, known), (options.models, ",".join(MODELS))):
        if given and (unknown := set(given.split(",")) - set(wanted.split(","))):
            parser.error(f"{', '.join(sorted(unknown))} was given; known are {wanted}")
    return options


def one_board(name: str, model: lj.Model, text: str, settings: Settings) -> Board:
    """Fit and score every lens on one text; print the table and return it, paired differences included."""
    corpus = lj.read(TEXTS[text])
    budget = BUDGETS.get(name, Budget())
    workshop = Workshop(
        model,
        corpus,
        settings.tokens,
        refine_steps=10 if settings.quick else 200,
        jacobian={
            "tokens": 100 if settings.quick else budget.jacobian_tokens,
            "skip_first": budget.skip_first,
        },
    )
    held = held_out(model, corpus, settings.positions)
    fitted = workshop.plan.batches["fit"]
    print(
        f"\n{name} ({model.n_blocks} blocks, d {model.width}), {text}, {fitted.n_tokens:,} tokens to fit on (bare: "
        f"{workshop.forward_seconds:.1f} CPU s), {len(held):,} held-out positions of "
        f"{len(held.document.unique()):,} documents, seed 0"
    )
    board: Board = {}
    scores: dict[str, Scores] = {}
    for lens, made in workshop.make([lens for lens in settings.lenses if lens in OURS]):
        scores[lens] = score(model, made.lens, held)
        board[lens] = _row(scores[lens], made, workshop.forward_seconds)
    if not model.masked:
        board |= _peers(name, text, workshop, held, scores, board, settings)
    for one, other in permutations(scores, 2):
        board[one].setdefault("kl_less_than", {})[other] = difference(scores[one], scores[other])
    print(table(board))
    print(f"  calibration error of the model itself {own_calibration(model, held):.3f}")
    return board


def _peers(
    name: str,
    text: str,
    workshop: Workshop,
    held: HeldOut,
    scores: dict[str, Scores],
    ours: Board,
    settings: Settings,
) -> Board:
    """Peers' rows: measured where their environments are given, recorded otherwise."""
    wanted = [lens for lens in settings.lenses if lens in PEERS]
    if settings.peers is None:
        known = recorded(name, text)
        for lens in wanted:
            if lens not in known:
                print(f"  {lens}: nothing is recorded; give --peers to measure it")
        return {lens: known[lens] | {"recorded": True} for lens in wanted if lens in known}
    board: Board = {}
    runs = run_peers(
        workshop,
        wanted,
        environments=settings.peers,
        work=settings.output / "peers" / name / text,
        budget=BUDGETS.get(name, Budget()),
        our_seconds=max(
            (ours[lens]["cpu_seconds"] for lens in ours if lens != "jacobian"), default=0
        ),
    )
    for lens, made, cost in runs:
        scores[lens] = score(workshop.model, made.lens, held)
        board[lens] = _row(scores[lens], made, workshop.forward_seconds) | {"fit": cost}
    if settings.record:
        about = {"tokens": settings.tokens, "positions": len(held), "machine": machine()}
        record(name, text, {lens: row | about for lens, row in board.items()})
    return board


def _row(scores: Scores, made: Made, forward_seconds: float) -> dict[str, Any]:
    return scores.summary() | {
        "cpu_seconds": made.seconds,
        "cost": made.seconds / forward_seconds,
        "levels": scores.levels(),
    }


def _short(by_text: dict[str, Board]) -> dict[str, dict[str, dict[str, Any]]]:
    """The last line's numbers: no intervals, no levels."""
    return {
        text: {
            lens: {name: round(row[name][0], 4) for name in PRINTED}
            | {"cost": round(row["cost"], 3)}
            | ({"recorded": True} if row.get("recorded") else {})
            for lens, row in board.items()
        }
        for text, board in by_text.items()
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
