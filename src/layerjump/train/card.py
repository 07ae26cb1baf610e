"""The model card of a model trained here: how it was made, and what was measured."""

from __future__ import annotations

from typing import Any


def card(record: dict[str, Any]) -> str:
    """A README in the form the hub reads."""
    return "\n\n".join([_head(record), _made(record), _measured(record), _use(record)]) + "\n"


def _head(record: dict[str, Any]) -> str:
    told = record["settings"]
    return (
        "---\nlibrary_name: transformers\ntags:\n- layerjump\n---\n\n"
        f"# {told['arch']}, {told['shape_layers']} blocks, width {told['shape_hidden']}"
    )


def _made(record: dict[str, Any]) -> str:
    told, text, held_out = (record[name] for name in ("settings", "text", "held_out"))
    penalty = (
        "no penalty"
        if told["penalty"] == "none"
        else f"penalty {told['penalty']}, strength {told['strength']:g}"
    )
    return "\n".join(
        [
            f"Trained from scratch by layerjump {record['layerjump']}, {penalty}.",
            f"- {record['parameters']:,} parameters, {told['shape_heads']} heads, {told['shape_positions']} positions, "
            f"byte-level BPE of {told['vocabulary']:,} tokens.",
            f"- {told['steps']:,} steps of {told['batch']} rows of {told['length']} tokens, learning rate "
            f"{told['learning_rate']:g}, seed {told['seed']}.",
            f"- Text `{text['name']}`: {text['documents']:,} documents, {record['tokens']:,} tokens, passed through "
            f"{record['passes']:.2f} times.",
            f"- Held out: `{held_out['name']}`, {held_out['documents']:,} documents.",
        ]
    )


def _measured(record: dict[str, Any]) -> str:
    first, last = record["tables"]["steps"][0], record["tables"]["steps"][-1]
    rows = [
        f"| {name} | {first[name]:.4g} | {last[name]:.4g} |"
        for name in last
        if name != "step" and first[name] is not None and last[name] is not None
    ]
    head = f"| on held-out text | step {first['step']} | step {last['step']} |\n|---|---|---|"
    return "\n".join([head, *rows])


def _use(record: dict[str, Any]) -> str:
    kind = (
        "AutoModelForMaskedLM" if record["settings"]["arch"] == "bert" else "AutoModelForCausalLM"
    )
    return f"`{kind}.from_pretrained(folder)` loads it; `training.json` holds every number."
