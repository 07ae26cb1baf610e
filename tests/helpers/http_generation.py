"""What tests of generation over HTTP share: jumps with a calibrated rule, and a model whose texts take seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import layerjump as lj
from layerjump.generation.calibration import calibration_file

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def calibrated_jumps(model: lj.Model, folder: Path) -> Path:
    """Jumps between all levels, with an exit rule beside them."""
    text = lj.load_text("pydoc", limit=900)
    jumps = lj.fit(model, text, tokens=4_000, pairs="all")
    jumps.save_pretrained(folder)
    calibration_file.save_calibration(
        lj.calibrate(model, jumps, text, target=0.5, confidence=0.6, rule_types=("gap",), draft_documents=0), folder
    )
    return folder


def slow_model(tiny: Path, folder: Path) -> Path:
    """Many small blocks, untrained: nothing ends its texts."""
    config = AutoConfig.from_pretrained(tiny, n_layer=64, n_positions=512, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny, model_max_length=512).save_pretrained(folder)
    return folder


def talking_model(source, folder):
    """A copy of a model with a chat template."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
