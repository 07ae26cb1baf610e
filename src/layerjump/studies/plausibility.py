"""`plausibility`: a blinded sheet for a human to mark, as the authors of `mat` had one marked.

Some sentences, one position each, read at every level through the map and through the identity: the five best tokens
of each reading are an item. Items are shuffled and say neither level nor lens; the key is a file of its own.
`layerjump plausibility score` scores the marked sheet. (bert-large, 50 sentences, 25 levels, one annotator who asked
only whether the tokens fit grammatically: 85.4 % for the map, 52.8 % for the identity.)
"""

from __future__ import annotations

import random

import torch

from layerjump.inputs.positions import Positions
from layerjump.inputs.states import states
from layerjump.inputs.tokens import token_text
from layerjump.studies.examples import context
from layerjump.studies.result import Result
from layerjump.studies.setup import Setup
from layerjump.studies.sheet import BEST, KEY, SHEET, Item, write_key, write_sheet

SENTENCES = 50
CHARACTERS = 200
"""Shown on each side of the position."""
GAP = "____"


def run(setup: Setup) -> Result:
    """Make the sheet and its key."""
    items = _items(setup)
    # Sorted by random(): the only draw that Python promises to repeat in any version.
    draw = random.Random(setup.settings.seed)
    items.sort(key=lambda _: draw.random())
    result = Result("plausibility")
    result.settings = {
        "items": len(items),
        "sentences": len({item.sentence for item in items}),
        "levels": setup.model.n_blocks + 1,
        "lenses": sorted({item.lens for item in items}),
        "best": BEST,
    }
    result.tables["sheet"] = [dict(result.settings)]
    result.headline = {"items_to_mark": len(items)}
    result.files = {SHEET: write_sheet(items), KEY: write_key(items, setup.model.name)}
    where = f"{GAP} marks the place" if setup.model.masked else "the place is right after the text"
    result.notes.append(
        f"{SHEET} is to be marked by someone who has not seen {KEY}: 1 in the column `plausible` where the tokens "
        f"could stand at the place ({where}), else 0. Then: layerjump plausibility score FOLDER. The paper's annotator "
        f"found 85.4 % of the map's and 52.8 % of the identity's plausible (bert-large)."
    )
    return result


@torch.no_grad()
def _items(setup: Setup) -> list[Item]:
    """Every sentence at every level through both lenses, in that order."""
    model = setup.model
    every, name = setup.lenses(), setup.settings.estimators[0]
    lenses = {name: every[name], "identity": every["identity"]}
    tokenizer = model.tokens.tokenizer
    items: list[Item] = []
    batches = setup.batches(positions=Positions("one"), picks=SENTENCES)
    sentence = 0
    for found in states(model, batches, range(model.n_blocks + 1)):
        for pick in range(min(found.batch.n_picks, SENTENCES - sentence)):
            where = context(model, found.batch, pick, characters=CHARACTERS, gap=GAP)
            for level in range(model.n_blocks + 1):
                state = found[level][pick : pick + 1]
                for lens, read in lenses.items():
                    best = read.logits(level, state)[0].topk(BEST).indices.tolist()
                    tokens = tuple(token_text(tokenizer, token) for token in best)
                    items.append(Item(where, tokens, lens, level, sentence))
            sentence += 1
    return items
