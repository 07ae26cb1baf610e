"""The model card of a pruned checkpoint: what was done, on what text, and what it costs."""

from __future__ import annotations

from typing import Any

from layerjump.compress.stand_ins import METHODS

TRUNCATED = "a jump to the state after the final norm, merged into an untied head"


def card(record: dict[str, Any]) -> str:
    """A README in the form the hub reads."""
    return "\n\n".join([_head(record), _done(record), _measured(record), _use(record)]) + "\n"


def _head(record: dict[str, Any]) -> str:
    left = record["blocks"] - len(record["dropped"])
    return (
        "---\nlibrary_name: transformers\ntags:\n- layerjump\n- pruned\n---\n\n"
        f"# {record['model']}, {left} of {record['blocks']} blocks"
    )


def _done(record: dict[str, Any]) -> str:
    method = record["method"]
    meaning = TRUNCATED if method == "truncate" else METHODS[method]
    before, after = (record["parameters"][name] for name in ("before", "after"))
    lines = [
        f"Made from `{record['model']}` (weights {record['fingerprint'][:12]}) by layerjump {record['layerjump']}.",
        f"- Blocks dropped, counted from 1: {', '.join(map(str, record['dropped']))} (chosen: {record['choice']}).",
        f"- In their place (`{method}`): {meaning}.",
        f"- Fitted in closed form on text `{record['text']}`: {record['tokens']:,} tokens in all, split "
        f"{record['split']}, seed {record['seed']}.",
        f"- Parameters: {before:,} before, {after:,} after.",
    ]
    if record["distilled"]:
        told = ", ".join(f"{name} {value}" for name, value in record["distilled"].items())
        lines.append(f"- Then distilled: {told}.")
    return "\n".join(lines)


def _measured(record: dict[str, Any]) -> str:
    loss = record["loss"]
    if not loss:
        return "Its loss was not measured."
    return (
        "| on test documents of that text | before | after |\n|---|---|---|\n"
        f"| loss, nats a token | {loss['before']:.4f} | {loss['after']:.4f} |\n"
        f"| perplexity | {loss['perplexity before']:.3f} | {loss['perplexity after']:.3f} |\n\n"
        f"Perplexity ratio {loss['ratio']:.3f} (95 % interval over documents {loss['low']:.3f} to "
        f"{loss['high']:.3f}), {loss['tokens']:,} tokens."
    )


def _use(record: dict[str, Any]) -> str:
    if record["method"] == "linear":
        return "The maps stand beside the checkpoint in `base/`, so load it with layerjump: `layerjump.load(folder)`."
    return (
        "An ordinary checkpoint: `AutoModelForCausalLM.from_pretrained(folder)` (encoders: "
        "`AutoModelForMaskedLM`) loads it, with no code of layerjump's."
    )
