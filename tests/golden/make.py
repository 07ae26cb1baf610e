"""Reference numbers for every metric, in the plainest way: numpy, scikit-learn, Hugging Face; nothing of layerjump.

Reads `examples.json`, runs the two small models of `tests/fixtures` in float64 one sentence at a time, keeps states,
and writes `gpt2.json`, `bert.json` and `thresholds.json` beside this file. Formulas are written out as in the papers.

    python tests/golden/make.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from linear import angle, level_rows, linearity_rows, why_rows
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "fixtures"
EXAMPLES = json.loads((HERE / "examples.json").read_text(encoding="utf-8"))
GRID = [-1.112, *np.arange(11) / 10, 1.112]
FINE = [1 + 0.112 * step / 10 for step in range(1, 10)]


# -- states


class Causal:
    """tiny-gpt2: all positions but the first."""

    name = "gpt2"

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-gpt2")
        self.model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-gpt2").double().eval()

    @torch.no_grad()
    def states(self, text):
        """(levels, positions, d): the last level as it leaves the last block, before the final norm."""
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        kept = []
        block = self.model.transformer.h[-1]
        handle = block.register_forward_hook(lambda module, args, output: kept.append(output))
        found = self.model(ids, output_hidden_states=True).hidden_states
        handle.remove()
        last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
        return torch.cat([*found[:-1], last.reshape(found[0].shape)]).numpy()

    def picked(self, part):
        """States (levels, rows, d) and positions (rows,) where maps are fitted or tested."""
        found = [self.states(EXAMPLES["documents"][i])[:, 1:] for i in EXAMPLES["gpt2"][part]]
        position = [np.arange(1, states.shape[1] + 1) for states in found]
        return np.concatenate(found, 1), np.concatenate(position)

    @torch.no_grad()
    def logits(self, states):
        normed = self.model.transformer.ln_f(torch.from_numpy(states))
        return self.model.lm_head(normed).numpy()


class Masked:
    """tiny-bert: one position a sentence, which is masked."""

    name = "bert"

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-bert")
        self.model = AutoModelForMaskedLM.from_pretrained(MODELS / "tiny-bert").double().eval()

    @torch.no_grad()
    def states(self, text, mask=None):
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        if mask is not None:
            ids[0, mask] = self.tokenizer.mask_token_id
        return torch.cat(self.model(ids, output_hidden_states=True).hidden_states).numpy()

    def picked(self, part):
        of = EXAMPLES["bert"]
        position = np.array([of["position"][i] for i in of[part]])
        found = [
            self.states(EXAMPLES["documents"][i], mask)[:, mask] for i, mask in zip(of[part], position, strict=True)
        ]
        return np.stack(found, 1), position

    @torch.no_grad()
    def logits(self, states):
        return self.model.cls(torch.from_numpy(states)).numpy()


# -- maps and R²


def mat(x, y):
    """Least squares without intercept; the default tolerance of scikit-learn would cut off small directions.

    BERT's level 0 of a mask knows only its position: few directions vary there, and the others are rounding.
    """
    return LinearRegression(fit_intercept=False, tol=1e-10).fit(x, y).coef_


def scores(y, predicted):
    return r2_score(y, predicted), r2_score(y, predicted, multioutput="variance_weighted")


def r2_rows(fit, test):
    rows = []
    for a in range(len(fit)):
        for b in range(a + 1, len(fit)):
            mapped, same = (scores(test[b], test[a] @ mat(fit[a], fit[b]).T), scores(test[b], test[a]))
            row = {"from": a, "to": b, "r2": mapped[0], "r2_identity": same[0]}
            rows.append(row | {"r2_weighted": mapped[1], "r2_weighted_identity": same[1]})
    return rows


def composed_rows(fit, test):
    """From each level to the last by the adjacent maps, one after the other."""
    rows = []
    for level in range(len(fit) - 1):
        state = test[level]
        for step in range(level, len(fit) - 1):
            state = state @ mat(fit[step], fit[step + 1]).T
        uniform, weighted = scores(test[-1], state)
        rows.append({"from": level, "r2_composed": uniform, "r2_weighted_composed": weighted})
    return rows


# -- predictions


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def read(model, fit, test):
    """Distributions at every level, by lens: the state as it is, and mapped to the last level."""
    last = len(fit) - 1
    mapped = [test[level] @ mat(fit[level], fit[last]).T for level in range(last)] + [test[last]]
    return {
        "identity": [softmax(model.logits(state)) for state in test],
        "mat": [softmax(model.logits(state)) for state in mapped],
    }


def prediction_row(approximate, true):
    top = approximate.argmax(-1)
    order = np.argsort(-true, -1)
    row = {f"p@{k}": float(np.mean([t in o[:k] for t, o in zip(top, order, strict=True)])) for k in (1, 5, 10)}
    row["surprisal"] = float(-np.log(true[np.arange(len(top)), top]).mean())
    row["kl"] = float((true * (np.log(true) - np.log(approximate))).sum(-1).mean())
    return row


# -- early exit


def threshold(strength, t, length):
    return 0.9 * strength + 0.1 * np.exp(-4 * t / length)


def stop(confidence, strength, t, length):
    """The level at which one example stops; its confidence at every level is given."""
    for level in range(1, len(confidence) - 1):
        if confidence[level] > threshold(strength, t, length):
            return level
    return len(confidence) - 1


def exit_rows(levels, position, length, grid):
    """Mean blocks run and share of the model's own tokens, for every λ."""
    two_best = [np.sort(level, -1)[:, -2:] for level in levels]
    confidence = np.stack([best[:, 1] - best[:, 0] for best in two_best])
    right = np.stack([level.argmax(-1) == levels[-1].argmax(-1) for level in levels])
    rows = []
    for strength in grid:
        stops = [stop(confidence[:, example], strength, t, length) for example, t in enumerate(position)]
        hits = [right[level, example] for example, level in enumerate(stops)]
        rows.append({"at": strength, "blocks": np.mean(stops), "agreement": np.mean(hits)})
    return rows


def exits(distributions, position, at):
    """By lens; `at` is the t of each example. N is of the true positions."""
    length = float(np.mean(position + 1))
    grids = {"identity": sorted(GRID + FINE), "mat": GRID}
    return {lens: exit_rows(distributions[lens], at, length, grids[lens]) for lens in grids}


# -- linearity


def all_tokens(model, part):
    """Whole sentences, nothing masked: (levels, rows, d), and which rows are at position 0."""
    found = [model.states(EXAMPLES["documents"][i]) for i in EXAMPLES[model.name][part]]
    first = np.concatenate([np.arange(states.shape[1]) == 0 for states in found])
    return np.concatenate(found, 1), first


def linearity_tables(model):
    (fit, fit_first), (test, test_first) = all_tokens(model, "fit"), all_tokens(model, "test")
    later, later_test = fit[:, ~fit_first], test[:, ~test_first]
    levels = range(len(test))
    return {
        "blocks": linearity_rows(fit, test),
        "blocks without position 0": linearity_rows(later, later_test),
        "why": why_rows(later_test),
        "levels": level_rows(later),
        "angles": [[angle(later_test[a], later_test[b]) for b in levels] for a in levels],
        "n_fit": fit.shape[1],
        "n_test": test.shape[1],
    }


def numbers(model):
    (fit, _), (test, position) = model.picked("fit"), model.picked("test")
    distributions = read(model, fit, test)
    three = np.full_like(position, 3)
    return {
        "n_fit": fit.shape[1],
        "n_test": test.shape[1],
        "r2": r2_rows(fit, test),
        "composed": composed_rows(fit, test),
        "predictions": {
            lens: [prediction_row(level, levels[-1]) for level in levels] for lens, levels in distributions.items()
        },
        "N": float(np.mean(position + 1)),
        "exits": exits(distributions, position, position),
        "exits at t = 3": exits(distributions, position, three),
        "linearity": linearity_tables(model),
    }


def write(name, data):
    text = json.dumps(data, indent=1, default=float)
    (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for model in (Causal(), Masked()):
        write(model.name, numbers(model))
    rows = [{"t": t, "threshold": threshold(1, t, 10)} for t in (0, 3, 10, 50)]
    write("thresholds", {"lambda": 1, "N": 10, "rows": rows})
