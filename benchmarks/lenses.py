"""Leaderboard of lenses: ours, tuned-lens and TransformerLens' Jacobian lens, by quality and by cost.

    python benchmarks/lenses.py [--models smollm2,stories15m,rxn-bert] [--lenses mat,calibrated,…] [--tokens N]
                                [--peers FOLDER] [--record] [-o lenses] [--quick]
    python benchmarks/lenses.py --part causal [--models smollm2,stories15m] [-o lenses] [--quick]

Every lens of a model is fitted once, on the same fit documents (for English models Wikipedia, news and stories in equal
parts), and selects its settings on the validation documents. The same code scores all lenses at the same positions of
test documents of each text, and of a text on which no lens is fitted: KL from the model's own output, Precision@1/5/10,
Surprisal, calibration error (the probability of the top token against the text) and marginal KL, averaged over levels
1 … L − 1 (a Jacobian lens has no level 0), with bootstrap intervals over documents. Cost is the CPU time of the fit, in
seconds and as a multiple of the bare forward pass over the fit documents in the same run.

Other tools (peers) run in their own environments (`benchmarks/peers/setup.sh FOLDER` creates them), on the same tokens.
The tuned lens is trained with the best of several optimiser settings, until its KL no longer falls and for at least ten
times the CPU time of `refined`; `refined long` may take as long. The output folder caches lenses for later runs with
the same settings. Without `--peers`, results of peers come from `benchmarks/peers/recorded.json`, and are marked. All
numbers go to `lenses.json`, the tables to `lenses.md`, the figure to `lenses.html`; the last line is JSON: model → text
→ lens → {kl, p1, cost, ece, …}.

`--part causal` measures instead whether the model uses what a lens reads (`leaderboard/causal.py`): `causal.json`,
`causal.md`, and a last line model → lens → {swap, disturbance, alignment, hidden, cosine}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from leaderboard.causal import CausalBoard, causal_board, causal_table, matrix_line
from leaderboard.causal_lenses import BUDGETS as CAUSAL_BUDGETS
from leaderboard.causal_lenses import LEVELS as CAUSAL_LEVELS
from leaderboard.causal_lenses import QUICK as QUICK_BUDGET
from leaderboard.causal_lenses import CausalLenses
from leaderboard.held_out import HeldOut, held_out, model_calibration
from leaderboard.ours import OURS, FittedLens, LensFitter
from leaderboard.peers import PEERS, Budget, record, record_scores, recorded, recorded_scores, run_peers
from leaderboard.scores import Scores, difference, score
from leaderboard.show import Board, compare_lenses, condensed, figure, markdown, table, write_page
from mixture import mixture

import layerjump as lj
from layerjump.metrics.timing import describe_machine

SHARED = Path(__file__).parents[2] / "shared"
TEXTS = {
    "wikipedia": SHARED / "text/leipzig/eng_wikipedia_2016_10K-sentences.txt",
    "news": SHARED / "text/leipzig/eng_news_2020_10K-sentences.txt",
    "stories": SHARED / "text/tinystories/tinystories_train_sample.txt",
    "biomedical": SHARED / "text/domains/biomedical.txt",
    "reactions": SHARED / "text/reactions.txt",
}
ENGLISH, UNSEEN = ("wikipedia", "news", "stories"), "biomedical"
MODELS = {
    "smollm2": ("smollm2", ENGLISH),
    "stories15m": (str(SHARED / "models/stories15M"), ENGLISH),
    "rxn-bert": (str(SHARED / "models/rxn-bert"), ("reactions",)),
    "stories260k": (str(SHARED / "models/stories260K"), ENGLISH),
}
"""Peers do not support masked models, so rxn-bert has our lenses only; stories260k is for trying out the peers."""
BOARDS = ("smollm2", "stories15m", "rxn-bert")
QUICK = ("stories15m",)
BUDGETS = {
    # A step costs an unembedding and its gradient at every level: fifteen times as much for SmolLM2 as for stories15M.
    "smollm2": Budget(steps=30, tokens_per_step=64, jacobian_tokens=800, skip_first=4),
    "stories15m": Budget(steps=40, tokens_per_step=256, jacobian_tokens=4_000),
    "stories260k": Budget(steps=20, tokens_per_step=256, most_minutes=1, jacobian_tokens=400),
}
TOKENS = {"smollm2": 40_000}
"""Tokens of all splits together, where they differ from the default: the tuned lens gets ten times our time."""
REFINE_STEPS = {"smollm2": {"refined": 60}, "stories15m": {"refined": 700, "refined long": 5_000}}
SLOW = ("n-njtc trained", "affine", "low-rank d/16", "low-rank d/2", "n-njtc", "calibrated raw")
"""Lenses that a quick run leaves out."""
CAUSAL_PROMPTS = {"smollm2": 48, "stories15m": 80}
"""Prompts of the causal part, from test documents."""
PRINTED = ("kl", "p1", "ece", "marginal_kl")
RIVALS = (
    ("calibrated", "mat"),
    ("refined", "calibrated"),
    ("refined", "tuned_lens"),
    ("refined long", "tuned_lens"),
    ("refined", "jacobian_transformerlens"),
    ("calibrated", "jacobian"),
)
"""Pairs of lenses that are compared."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    lenses: list[str]
    tokens: int
    positions: int
    quick: bool
    peers: Path | None
    record: bool
    output: Path


def main() -> None:
    options = _options()
    if options.part == "causal":
        run_causal(options)
        return
    settings = Settings(
        lenses=[lens for lens in options.lenses.split(",") if not (options.quick and lens in SLOW)],
        tokens=4_000 if options.quick else options.tokens or 0,
        positions=60 if options.quick else options.positions,
        quick=options.quick,
        peers=options.peers,
        record=options.record,
        output=options.output,
    )
    names = options.models.split(",") if options.models else QUICK if options.quick else BOARDS
    settings.output.mkdir(parents=True, exist_ok=True)
    print(describe_machine())
    boards: dict[str, dict[str, Board]] = {}
    for name in names:
        boards[name] = all_boards(name, settings)
    figures = [
        figure(name, text, board, tuple(PEERS)) for name, by_text in boards.items() for text, board in by_text.items()
    ]
    write_page(figures, settings.output / "lenses.html")
    pages = [_page(name, by_text) for name, by_text in boards.items()]
    (settings.output / "lenses.md").write_text("\n\n".join(pages) + "\n")
    (settings.output / "lenses.json").write_text(json.dumps(boards, indent=1, allow_nan=False) + "\n")
    print(json.dumps({name: _short(by_text) for name, by_text in boards.items()}))


def run_causal(options: argparse.Namespace) -> None:
    """Measure the causal axis of some models, print their tables and write them."""
    names = options.models.split(",") if options.models else QUICK if options.quick else tuple(CAUSAL_LEVELS)
    options.output.mkdir(parents=True, exist_ok=True)
    print(describe_machine())
    boards = {name: _causal_board(name, options) for name in names}
    pages = [f"## {name}\n\n{causal_table(board)}\n\n{matrix_line(board)}" for name, board in boards.items()]
    (options.output / "causal.md").write_text("\n\n".join(pages) + "\n")
    recorded = {name: board.to_dict() for name, board in boards.items()}
    (options.output / "causal.json").write_text(json.dumps(recorded, indent=1, allow_nan=False) + "\n")
    print(json.dumps({name: board.short() for name, board in boards.items()}))


def _causal_board(name: str, options: argparse.Namespace) -> CausalBoard:
    source, texts = MODELS[name]
    model = lj.load(source)
    mixed = mixture({text: lj.load_text(TEXTS[text]) for text in texts})
    quick = options.quick
    fitter = CausalLenses(
        model,
        mixed.corpus,
        CAUSAL_LEVELS[name][::2] if quick else CAUSAL_LEVELS[name],
        QUICK_BUDGET if quick else CAUSAL_BUDGETS[name],
        folder=None if quick else options.output / "causal" / name,
    )
    print(f"\n{name}: levels {', '.join(map(str, fitter.levels))}, {mixed.corpus.name}, {fitter.budget}, seed 0")
    board = causal_board(fitter, 20 if quick else CAUSAL_PROMPTS[name], n_questions=20 if quick else None)
    print(f"{board.prompts} prompts; {board.answered} of {board.questions} questions answered")
    print(f"{causal_table(board)}\n{matrix_line(board)}", flush=True)
    return board


def _page(name: str, by_text: dict[str, Board]) -> str:
    """Return a model's tables: all texts condensed, then each text in full, with comparisons of lenses."""
    comparisons = {
        text: [compare_lenses(*rivals, board).strip() for rivals in RIVALS if _is_paired(*rivals, board)]
        for text, board in by_text.items()
    }
    parts = [f"## {name}", condensed(by_text)]
    for text, board in by_text.items():
        parts += [f"### {name}, {text}", markdown(board), "\n".join(f"- {line}" for line in comparisons[text])]
    return "\n\n".join(parts)


def _is_paired(one: str, other: str, board: Board) -> bool:
    """Return whether the scores of two lenses are compared position by position."""
    return other in board.get(one, {}).get("beside", {})


def _options() -> argparse.Namespace:
    all_lenses = ",".join([*OURS, *PEERS])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("predictive", "causal"), default="predictive")
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--lenses", default=all_lenses, help=f"some of {all_lenses.replace(',', ', ')}")
    parser.add_argument("--tokens", type=int, help="tokens of all splits together")
    parser.add_argument("--positions", type=int, default=600, help="positions scored of each text")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--record", action="store_true", help="record the peers' results")
    parser.add_argument("-o", "--output", type=Path, default=Path("lenses"))
    parser.add_argument("--quick", action="store_true", help="little text: within two minutes")
    options = parser.parse_args()
    models = CAUSAL_LEVELS if options.part == "causal" else MODELS
    for names, allowed in ((options.lenses, all_lenses), (options.models, ",".join(models))):
        if names and (unknown := set(names.split(",")) - set(allowed.split(","))):
            parser.error(f"expected some of {allowed}, got {', '.join(sorted(unknown))}")
    return options


def all_boards(name: str, settings: Settings) -> dict[str, Board]:
    """Fit every lens of a model, score it on each text, print the tables and return them."""
    source, texts = MODELS[name]
    model = lj.load(source)
    mixed = mixture({text: lj.load_text(TEXTS[text]) for text in texts})
    budget = BUDGETS.get(name, Budget())
    fitter = LensFitter(
        model,
        mixed.corpus,
        settings.tokens or TOKENS.get(name, 60_000),
        refine_steps={"refined": 10} if settings.quick else REFINE_STEPS.get(name, {"refined": 200}),
        folder=None if settings.quick else settings.output / "ours" / name,
        jacobian={"tokens": 100 if settings.quick else budget.jacobian_tokens, "skip_first": budget.skip_first},
    )
    print(
        f"\n{name} ({model.n_blocks} blocks, d {model.d_model}): {fitter.plan.batches['fit'].n_tokens:,} tokens of "
        f"{mixed.corpus.name} to fit on (forward pass: {fitter.forward_seconds:.1f} CPU s), seed 0"
    )
    lenses = dict(fitter.fit([lens for lens in settings.lenses if lens in OURS]))
    costs: dict[str, dict[str, Any]] = {}
    if settings.peers is not None and not model.masked:
        our_seconds = lenses["refined"].seconds if "refined" in lenses else 0
        for lens, fitted, cost in _run_peers(name, fitter, settings, our_seconds):
            lenses[lens], costs[lens] = fitted, cost
    held = {text: held_out(model, mixed.corpus, settings.positions, among=mixed.of[text]) for text in texts}
    if texts == ENGLISH:
        held[UNSEEN] = held_out(model, lj.load_text(TEXTS[UNSEEN]), settings.positions)
    return {text: one_board(name, text, fitter, positions, lenses, costs, settings) for text, positions in held.items()}


def _run_peers(
    name: str, fitter: LensFitter, settings: Settings, our_seconds: float
) -> Iterator[tuple[str, FittedLens, dict[str, Any]]]:
    assert settings.peers is not None
    return run_peers(
        fitter,
        [lens for lens in settings.lenses if lens in PEERS],
        environments=settings.peers,
        work=settings.output / "peers" / name / "mixture",
        budget=BUDGETS.get(name, Budget()),
        our_seconds=our_seconds,
    )


def one_board(
    name: str,
    text: str,
    fitter: LensFitter,
    held: HeldOut,
    lenses: dict[str, FittedLens],
    costs: dict[str, dict[str, Any]],
    settings: Settings,
) -> Board:
    """Score every lens on one text, with paired differences; peers that did not run come from the record."""
    model, unit = fitter.model, fitter.forward_seconds
    scores = {lens: score(model, fitted.lens, held) for lens, fitted in lenses.items()}
    board: Board = {lens: _row(scores[lens], lenses[lens], unit) for lens in lenses}
    for lens, cost in costs.items():
        board[lens]["fit"] = cost
    if settings.record and costs:
        about = {"tokens": fitter.tokens, "positions": len(held), "machine": describe_machine()}
        record(name, text, {lens: board[lens] | about for lens in costs})
        for lens in costs:
            record_scores(name, text, lens, scores[lens])
    records = recorded(name, text)
    for lens in [lens for lens in settings.lenses if lens in PEERS and lens in records]:
        if lens not in lenses:
            board[lens] = records[lens] | {"recorded": True}
            theirs = recorded_scores(name, text, lens, held)
            scores |= {} if theirs is None else {lens: theirs}
    for one, other in RIVALS:
        if one in lenses and other in scores:
            board[one].setdefault("beside", {})[other] = {
                measure: difference(scores[one], scores[other], measure) for measure in ("kl", "p1")
            }
    documents = len(held.document.unique())
    print(f"\n{name}, {text}: {len(held):,} held-out positions of {documents:,} documents")
    print(table(board))
    print("\n".join(compare_lenses(*rivals, board) for rivals in RIVALS if _is_paired(*rivals, board)))
    print(f"  calibration error of the model itself {model_calibration(model, held):.3f}", flush=True)
    return board


def _row(scores: Scores, fitted: FittedLens, forward_seconds: float) -> dict[str, Any]:
    jumps = fitted.lens.jumps
    return scores.summary() | {
        "cpu_seconds": fitted.seconds,
        "cost": fitted.seconds / forward_seconds,
        "parameters": 0 if jumps is None else sum(part.numel() for part in jumps.parameters()),
        "levels": scores.levels(),
    }


def _short(by_text: dict[str, Board]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the numbers of the last line, without intervals and levels."""
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
