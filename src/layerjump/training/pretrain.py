"""pretrain(): train a small model from scratch, with or without a penalty, and measure how linear it becomes.

    recipe = lj.Recipe(arch="mistral", penalty="cosine", penalty_weight=0.5, steps=2000)
    record = lj.pretrain(lj.load_text("stories.txt"), "model", recipe)
    record.tables.steps[-1]["perplexity"]

The folder is an ordinary Hugging Face checkpoint with `training.json`, which `PretrainingRecord.load` reads.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from layerjump import __version__
from layerjump.data.corpus import Corpus, split_indices
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText, BadTraining, argument
from layerjump.io import check_free, read_json, replace_folder, write_json, write_text
from layerjump.jumps.serialization import StrictRecord, read_record
from layerjump.models.hugging_face_config import task_of
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model
from layerjump.training.build_model import ModelShape, TrainingArchitecture, build_model, find_architecture
from layerjump.training.linearity_profile import Measurements, TrainingMonitor
from layerjump.training.packed_rows import PackedRows, pack_rows
from layerjump.training.regularizers import PENALTIES
from layerjump.training.tokenizer import train_tokenizer
from layerjump.training.trainer import PenaltyTrainer, find_checkpoint, remove_training_folder, silence_trainer

logger = logging.getLogger("layerjump")

NO_PENALTY = "none"
RECORD_FILE, PAGE_FILE = "training.json", "training.html"
HELD_OUT_SPLIT = "95/0/5"
"""Split of the documents where no held-out text is passed."""


@dataclass(frozen=True)
class Recipe(ModelShape):
    """Settings of a pretraining run; the same settings and text give the same model."""

    arch: str = "llama"
    """llama, mistral, gpt2, bert, or any causal or image–text model type of transformers."""
    vocab_size: Annotated[int, Field(alias="vocabulary")] = 2048
    length: int = 128
    """Number of tokens in a row."""
    penalty: str = NO_PENALTY
    """Name of a penalty on hidden states: none, cosine, mse or jump."""
    penalty_weight: Annotated[float, Field(alias="strength")] = 0.5
    levels: tuple[int, ...] | None = None
    """Levels to penalise; None for 1 to L."""
    steps: int = 1000
    batch_size: Annotated[int, Field(alias="batch")] = 32
    """Number of rows in an optimiser step, over all processes and micro-batches."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    seed: int = 0
    eval_every: Annotated[int, Field(alias="every")] = 100
    """Number of steps between measurements, and between checkpoints."""
    bf16: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        penalties = [NO_PENALTY, *PENALTIES]
        find_architecture(self.arch)  # raises for an unknown one
        self._require("penalty", self.penalty in penalties, f"to be one of {', '.join(penalties)}")
        for name in ("steps", "batch_size", "eval_every", "length"):
            self._require(name, getattr(self, name) >= 1, "of 1 or more")
        self._require("seed", self.seed >= 0, "of 0 or more")
        self._require("learning_rate", 0 < self.learning_rate < math.inf, "above 0")
        self._require("penalty_weight", 0 <= self.penalty_weight < math.inf, "of 0 or more")
        in_range = all(1 <= level <= self.layers for level in self.levels or ())
        self._require("levels", in_range, f"among 1 to {self.layers}")
        if self.length > self.max_positions:
            raise BadTraining(
                f"the model has {self.max_positions} positions, but rows of {self.length} tokens are requested; "
                f"pass {argument('length', self.max_positions)} or less, or "
                f"{argument('max_positions', self.length)}"
            )

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise BadTraining(f"expected {argument(name)} {expected}, got {getattr(self, name)!r}")

    @property
    def architecture(self) -> TrainingArchitecture:
        return find_architecture(self.arch)


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(Recipe):
    """A recipe and the SHA-256 of its texts; in the record of a run without penalty its weight is 0."""

    __pydantic_config__ = ConfigDict(strict=False)

    text: str
    held_out: str

    def __post_init__(self) -> None:
        pass  # the recipe is checked already, and a record of any version can be read


class TextSummary(BaseModel):
    """Name and size of a text."""

    name: str
    documents: int


class PretrainingRecord(StrictRecord):
    """Everything that `training.json` holds: settings, losses and measurements of a run."""

    model_config = ConfigDict(allow_inf_nan=True)

    kind: Literal["layerjump pretraining"] = "layerjump pretraining"
    layerjump: str
    """Version of layerjump that trained the model."""
    settings: PretrainingSettings
    text: TextSummary
    held_out: TextSummary
    parameters: int
    tokens: int
    """Number of tokens in the training rows."""
    passes: float
    """Number of epochs."""
    processes: int
    minutes: float
    log: list[dict[str, int | float]]
    """Entries of the Trainer's log: step, loss, lm_loss, penalty, grad_norm, learning_rate, epoch."""
    tables: Measurements

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a `training.json`, or that of a model folder."""
        path = Path(path).expanduser()
        path = path / RECORD_FILE if path.is_dir() else path
        return read_record(cls, read_json(path), path)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `training.json`."""
        return self.model_dump(by_alias=True)


def pretrain(
    text: Corpus,
    folder: str | Path,
    recipe: Recipe,
    *,
    eval_text: Corpus | None = None,
    micro_batches: int = 1,
    device: str | None = None,
    keep_checkpoints: bool = False,
    force: bool = False,
    render_page: Callable[[PretrainingRecord], str] | None = None,
) -> PretrainingRecord:
    """Train a tokenizer and a model, and write them as a Hugging Face checkpoint with a record of the run.

    Checkpoints of the run go to `FOLDER-training`. After an interruption the same call resumes from the last one. They
    are removed at the end unless `keep_checkpoints`. Under `torchrun` or `accelerate launch` every process makes this
    call, and the first one writes.

    Args:
        text: Documents to train on.
        folder: Output folder; it must not exist unless `force`.
        recipe: Architecture, data and optimiser settings.
        eval_text: Text to measure on; by default 5 % of the documents of `text`.
        micro_batches: Number of micro-batches in a step.
        device: "cpu" or "cuda"; by default a GPU if there is one.
        keep_checkpoints: Keep all checkpoints of the run.
        force: Overwrite an existing folder.
        render_page: Function that makes the HTML of `training.html` from the record.
    """
    folder = Path(folder).expanduser()
    check_free(folder, force=force)
    training_folder = folder.with_name(f"{folder.name}-training")
    if eval_text is None:
        split = split_indices(len(text.documents), HELD_OUT_SPLIT, seed=recipe.seed)
        eval_text = Corpus(text.name, tuple(text.documents[i] for i in sorted(split.test)), "held out")
        text = Corpus(text.name, tuple(text.documents[i] for i in sorted(split.fit)), "to train on")
    elif eval_text.sha256 == text.sha256:
        raise BadText(
            f"{argument('eval_text')} is the text to train on; pass another text, or none to hold out 5 % of the "
            "documents"
        )
    arguments = training_arguments(
        recipe, training_folder, micro_batches=micro_batches, device=device, keep_checkpoints=keep_checkpoints
    )
    settings = PretrainingSettings(**vars(recipe), text=text.sha256, held_out=eval_text.sha256)
    max_positions, is_masked = recipe.max_positions, recipe.architecture.masked
    start = time.perf_counter()
    with arguments.main_process_first(local=False, desc="tokenizer"):
        run = TypeAdapter(PretrainingSettings).dump_python(settings, mode="json", by_alias=True)
        checkpoint = find_checkpoint(training_folder, run)
        if checkpoint is None and arguments.process_index == 0:
            new_tokenizer = train_tokenizer(text.documents, recipe.vocab_size, max_positions, masked=is_masked)
            replace_folder(training_folder / "tokenizer", new_tokenizer.save_pretrained, force=True)
        # Every process and every restart reads the same tokenizer.
        tokenizer = AutoTokenizer.from_pretrained(training_folder / "tokenizer")
    tokenization = Tokenization.of(tokenizer, max_positions=max_positions, masked=is_masked)
    rows = pack_rows(text.documents, tokenization, recipe.length)
    hf = build_model(recipe.architecture, recipe, tokenizer, seed=recipe.seed)
    model = Model.wrap(hf, tokenizer, name="model")
    if not (model.masked or model.causal):
        raise BadTraining(
            f"expected {argument('arch')} to be a causal model type, got {recipe.arch}, whose states depend on later "
            f"tokens"
        )
    if model.n_blocks != recipe.layers:
        logger.info("%s needs %d blocks for its kinds of blocks, not %d", recipe.arch, model.n_blocks, recipe.layers)
        settings = replace(settings, layers=model.n_blocks)
    monitor = TrainingMonitor(model, eval_text, eval_every=recipe.eval_every, folder=training_folder)
    log = train_model(hf, tokenizer, rows, recipe, arguments, monitor=monitor, checkpoint=checkpoint)
    if recipe.penalty == NO_PENALTY:
        settings = replace(settings, penalty_weight=0.0)
    record = PretrainingRecord(
        layerjump=__version__,
        settings=settings,
        text=TextSummary(name=text.name, documents=len(text.documents)),
        held_out=TextSummary(name=eval_text.name, documents=len(eval_text.documents)),
        parameters=hf.num_parameters(),
        tokens=rows.numel(),
        passes=recipe.steps * recipe.batch_size / len(rows),
        processes=arguments.world_size,
        minutes=round((time.perf_counter() - start) / 60, 2),
        log=log,
        tables=monitor.measurements,
    )

    def write(new_folder: Path) -> None:
        with quiet_transformers():
            hf.save_pretrained(new_folder)
            tokenizer.save_pretrained(new_folder)
        write_json(new_folder / RECORD_FILE, record.to_json())
        write_text(new_folder / "README.md", model_card(record))
        if render_page is not None:
            write_text(new_folder / PAGE_FILE, render_page(record))

    if arguments.process_index == 0:
        replace_folder(folder, write, force=force)
        if not keep_checkpoints:
            remove_training_folder(training_folder)
    return record


def join_corpora(corpora: Sequence[Corpus]) -> Corpus:
    """Join several texts into one."""
    documents = tuple(document for corpus in corpora for document in corpus.documents)
    return Corpus(" + ".join(corpus.name for corpus in corpora), documents, "put together")


def training_arguments(
    recipe: Recipe, folder: Path, *, micro_batches: int = 1, device: str | None = None, keep_checkpoints: bool = False
) -> TrainingArguments:
    """Translate a recipe for the Trainer. Under `torchrun` or `accelerate launch` this joins the process group."""
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if device not in (None, "cpu", "cuda"):
        raise BadTraining(f"expected {argument('device')} to be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadTraining(f"this machine has no GPU; leave {argument('device')} out, or pass cpu")
    n_parts = micro_batches * n_processes
    if n_parts < 1 or recipe.batch_size % n_parts:
        raise BadTraining(
            f"a batch of {recipe.batch_size} rows does not divide into {micro_batches} micro-batches in "
            f"each of {n_processes} processes; pass a multiple of {max(n_processes, n_parts)}"
        )
    use_cpu = device == "cpu" or not torch.cuda.is_available()
    every = recipe.eval_every
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size // n_parts,
        gradient_accumulation_steps=micro_batches,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, recipe.steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=recipe.bf16,
        train_sampling_strategy="sequential",  # `PackedRows` is shuffled
        save_steps=every,
        save_total_limit=None if keep_checkpoints else 2,
        # The largest divisor of `eval_every` up to a fifth of it, so that a resumed run logs the same means.
        logging_steps=next(n for n in range(max(1, every // 5), 0, -1) if every % n == 0),
        report_to=[],
        use_cpu=use_cpu,
        ddp_backend="gloo" if use_cpu and n_processes > 1 else None,
        seed=recipe.seed,
        disable_tqdm=True,  # it prints to standard output
    )
    if not use_cpu:
        # With several GPUs in one process the Trainer runs replicas, whose states our hooks do not capture.
        arguments._n_gpu = 1
    return arguments


def train_model(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Tensor,
    recipe: Recipe,
    arguments: TrainingArguments,
    *,
    monitor: TrainerCallback | None = None,
    checkpoint: str | None = None,
) -> list[dict[str, int | float]]:
    """Train a model in place, from a checkpoint if one is passed; return the logged losses."""
    is_masked = task_of(hf) == "masked"
    dataset = PackedRows(
        rows, recipe.steps * recipe.batch_size, seed=recipe.seed, masking_tokenizer=tokenizer if is_masked else None
    )
    trainer = PenaltyTrainer(
        hf,
        arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        penalty=PENALTIES.get(recipe.penalty),
        penalty_weight=recipe.penalty_weight,
        levels=recipe.levels,
    )
    if monitor is not None:
        trainer.add_callback(monitor)
    silence_trainer(trainer)
    with quiet_transformers():
        trainer.train(resume_from_checkpoint=checkpoint)
    hf.eval()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def model_card(record: PretrainingRecord) -> str:
    """Return the README.md of a model: how it was trained, and the measurements before and after."""
    settings, text, held_out = record.settings, record.text, record.held_out
    penalty = (
        "no penalty"
        if settings.penalty == NO_PENALTY
        else f"penalty {settings.penalty}, weight {settings.penalty_weight:g}"
    )
    first, last = record.tables.steps[0], record.tables.steps[-1]
    changes = "\n".join(
        f"| {name} | {before:.4g} | {after:.4g} |"
        for name, after in last.items()
        if name != "step" and (before := first[name]) is not None and after is not None
    )
    auto = find_architecture(settings.arch).loader
    return f"""---
library_name: transformers
tags:
- layerjump
---

# {settings.arch}, {settings.layers} blocks, width {settings.hidden_size}

Trained from scratch by layerjump {record.layerjump}, {penalty}.
- {record.parameters:,} parameters, {settings.heads} heads, {settings.max_positions} positions, \
byte-level BPE of {settings.vocab_size:,} tokens.
- {settings.steps:,} steps of {settings.batch_size} rows of {settings.length} tokens, learning rate \
{settings.learning_rate:g}, seed {settings.seed}.
- Text `{text.name}`: {text.documents:,} documents, {record.tokens:,} tokens, {record.passes:.2f} epochs.
- Held out: `{held_out.name}`, {held_out.documents:,} documents.

| on held-out text | step {first["step"]} | step {last["step"]} |
|---|---|---|
{changes}

`{auto}.from_pretrained(folder)` loads it; `training.json` holds every number.
"""
