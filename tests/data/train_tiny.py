"""Train the two tiny models that the tests load: real weights, small enough to commit.

`tiny-gpt2` is a causal GPT-2 and `tiny-bert` a masked-LM BERT, both of 4 blocks and trained
from scratch on TinyStories text, which is read from a folder and never copied here. From the
repository's root, one command for each model, a few minutes on two CPU cores:

    OMP_NUM_THREADS=2 python tests/data/train_tiny.py gpt2 --text ../shared/text/tinystories
    OMP_NUM_THREADS=2 python tests/data/train_tiny.py bert --text ../shared/text/tinystories

Each writes its folder next to this file: weights, configuration, tokenizer, `README.md` and
`metrics.json`, the last two with perplexities on a file of text the training never saw.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

TRAIN_FILES = ("tinystories_train_sample.txt", "tinystories_sampled.txt")
HELD_OUT_FILE = "tinystories_valid_sample.txt"
SEED = 0
VOCABULARY = 1024
LENGTH = 128
WIDTH, BLOCKS, HEADS = 80, 4, 4
STEPS = {"gpt2": 1000, "bert": 3000}
LEARNING_RATE = {"gpt2": 4e-3, "bert": 2e-3}
END_OF_TEXT = "<|endoftext|>"

Example = dict[str, list[int]]
Collator = Callable[[list[Any]], dict[str, Any]]


def paragraphs(path: Path) -> list[str]:
    """The non-empty lines of a text file."""
    return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]


def byte_pairs(text: list[str], alphabet: list[str], specials: list[str], lower: bool) -> Tokenizer:
    """Byte-level BPE trained on the text; unlike WordPiece's, its training is deterministic."""
    tokenizer = Tokenizer(models.BPE(unk_token=specials[-1]))
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=lower)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def gpt2_tokenizer(text: list[str]) -> PreTrainedTokenizerFast:
    """Every byte has a token and none is added to a text, as with GPT-2's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(text, alphabet, [END_OF_TEXT], lower=False),
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT),
        model_max_length=LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )


def bert_tokenizer(text: list[str]) -> PreTrainedTokenizerFast:
    """Lower-cased, within `[CLS] ... [SEP]`; bytes that the text lacks are `[UNK]`."""
    names = ("pad", "cls", "sep", "mask", "unk")
    specials = {f"{name}_token": f"[{name.upper()}]" for name in names}
    tokenizer = byte_pairs(text, [], list(specials.values()), lower=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **specials,
        model_max_length=LENGTH,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def build_model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained model of the family, without dropout: it sees its text a few times only."""
    if family == "gpt2":
        end = tokenizer.eos_token_id
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=LENGTH,
                n_embd=WIDTH,
                n_layer=BLOCKS,
                n_head=HEADS,
                bos_token_id=end,
                eos_token_id=end,
                pad_token_id=end,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            )
        )
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=LENGTH,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            initializer_range=0.05,
            pad_token_id=tokenizer.pad_token_id,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        )
    )
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.copy_(0.07 * waves())
    return model


def waves() -> torch.Tensor:
    """Sines and cosines of each position, from which heads soon learn to look at neighbours."""
    frequencies = LENGTH ** -torch.linspace(0, 1, WIDTH // 2)
    angles = torch.arange(LENGTH)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def encode(family: str, tokenizer: PreTrainedTokenizerFast, text: list[str]) -> list[Example]:
    """GPT-2: paragraphs and their end marks packed to `LENGTH`; BERT: each paragraph's pieces."""
    ids = [e.ids for e in tokenizer.backend_tokenizer.encode_batch(text, add_special_tokens=False)]
    if family == "gpt2":
        stream = [i for paragraph in ids for i in [*paragraph, tokenizer.eos_token_id]]
        starts = range(0, len(stream) - LENGTH + 1, LENGTH)
        chunks = [stream[s : s + LENGTH] for s in starts]
        return [{"input_ids": chunk, "labels": chunk} for chunk in chunks]
    room = LENGTH - 2
    pieces = [p[s : s + room] for p in ids for s in range(0, len(p), room)]
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [{"input_ids": [first, *piece, last]} for piece in pieces]


def collator(family: str, tokenizer: PreTrainedTokenizerFast, **masking: float) -> Collator:
    """What makes a batch of examples; BERT's masks 15 % of the tokens."""
    if family == "gpt2":
        return default_data_collator
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=SEED, **masking)


def train(family: str, model: PreTrainedModel, examples: list[Example], collate: Collator) -> None:
    """Train the model in place; nothing of the run but the weights is kept."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS[family],
            per_device_train_batch_size=32,
            learning_rate=LEARNING_RATE[family],
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            weight_decay=0.01,
            train_sampling_strategy="group_by_length",
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        Trainer(model, arguments, data_collator=collate, train_dataset=examples).train()


def predictions(
    model: PreTrainedModel, examples: list[Example], collate: Collator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of the model's log-probabilities of the tokens it has to predict, and those."""
    for batch in DataLoader(examples, batch_size=64, collate_fn=collate):
        labels = batch.pop("labels")
        logits = model(**batch).logits
        if isinstance(model, GPT2LMHeadModel):
            logits, labels = logits[:, :-1], labels[:, 1:]
        wanted = labels != -100
        targets = labels[wanted]
        yield logits[wanted].log_softmax(-1).gather(-1, targets[:, None]), targets


@torch.no_grad()
def measure(
    model: PreTrainedModel, train: list[Example], held_out: list[Example], collate: Collator
) -> dict[str, float]:
    """Perplexity of the model and of the add-one unigram model on the same held-out tokens."""
    model.eval()
    scores, targets = (torch.cat(x) for x in zip(*predictions(model, held_out, collate)))
    seen = torch.tensor([i for example in train for i in example["input_ids"]])
    counts = torch.bincount(seen, minlength=model.config.vocab_size) + 1.0
    unigram = (counts / counts.sum()).log()[targets]
    return {
        "held_out_tokens": len(targets),
        "perplexity": round(math.exp(-scores.double().mean()), 3),
        "unigram_perplexity": round(math.exp(-unigram.double().mean()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one of the tests' tiny models.")
    parser.add_argument("family", choices=("gpt2", "bert"))
    parser.add_argument("--text", type=Path, required=True, help="folder of TinyStories text")
    family, folder = (arguments := parser.parse_args()).family, arguments.text
    set_seed(SEED)
    text = [p for name in TRAIN_FILES for p in paragraphs(folder / name)]
    tokenizer = {"gpt2": gpt2_tokenizer, "bert": bert_tokenizer}[family](text)
    model = build_model(family, tokenizer)
    examples = encode(family, tokenizer, text)
    held_out = encode(family, tokenizer, paragraphs(folder / HELD_OUT_FILE))
    train(family, model, examples, collator(family, tokenizer))
    always_mask = collator(family, tokenizer, mask_replace_prob=1.0, random_replace_prob=0.0)
    metrics = {"seed": SEED, "steps": STEPS[family]}
    metrics |= measure(model, examples, held_out, always_mask)
    print(metrics)
