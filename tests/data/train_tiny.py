"""Train the two tiny models that the tests load: real weights, small enough to commit.

`tiny-gpt2` is a causal GPT-2 and `tiny-bert` a masked-LM BERT, both trained from scratch on
TinyStories text, which is read from a folder and never copied here. From the repository's
root, one command for each model, a few minutes on two idle CPU cores:

    OMP_NUM_THREADS=2 python tests/data/train_tiny.py gpt2 --text ../shared/text/tinystories
    OMP_NUM_THREADS=2 python tests/data/train_tiny.py bert --text ../shared/text/tinystories

Each writes its folder next to this file: weights, configuration, tokenizer, `README.md` and
`metrics.json`, the last two with perplexities on a file of text that training never saw.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers as tk
import torch
import transformers as hf

TRAIN_FILES = ("tinystories_train_sample.txt", "tinystories_sampled.txt")
HELD_OUT_FILE = "tinystories_valid_sample.txt"
SEED = 0
VOCABULARY, LENGTH = 1024, 128
WIDTH, BLOCKS, HEADS = 80, 4, 4
RECIPE: dict[str, dict[str, Any]] = {
    "gpt2": {"max_steps": 800, "per_device_train_batch_size": 32, "learning_rate": 3e-3},
    "bert": {"max_steps": 1800, "per_device_train_batch_size": 64, "learning_rate": 1e-3},
}
END_OF_TEXT = "<|endoftext|>"
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt2": dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT),
    "bert": {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk")}
    | {"mask_token": hf.AddedToken("[MASK]", lstrip=True, special=True)},
}
TASK = {"gpt2": "held-out tokens", "bert": "masked held-out tokens (15 %, all as `[MASK]`)"}
README = f"""# tiny-{{family}}

{BLOCKS} blocks, width {WIDTH}, vocabulary {VOCABULARY}; trained from scratch for layerjump's tests,
with seed {{seed}} and {{steps}} steps. From the repository's root:

    OMP_NUM_THREADS=2 python tests/data/train_tiny.py {{family}} --text ../shared/text/tinystories

Trained on `{TRAIN_FILES[0]}` and `{TRAIN_FILES[1]}` (stories
sampled from a model of them); held out: `{HELD_OUT_FILE}`. TinyStories is
licensed CDLA-Sharing-1.0; none of its text is in this folder.

On {{held_out_tokens}} {{task}}: perplexity {{perplexity}} (unigram model: {{unigram_perplexity}}).
"""

Example = dict[str, list[int]]
Collator = Callable[[list[Any]], dict[str, Any]]


def paragraphs(path: Path) -> list[str]:
    """The non-empty lines of a text file."""
    return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]


def train_tokenizer(family: str, text: list[str]) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE; BERT's is lower-cased, within `[CLS] ... [SEP]`, and GPT-2's adds nothing."""
    special = SPECIAL[family]
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=family == "bert")
    tokenizer.decoder = tk.decoders.ByteLevel()
    if family == "bert":
        tokenizer.normalizer = tk.normalizers.Lowercase()
        tokenizer.post_processor = tk.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    trainer = tk.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list({str(token): token for token in special.values()}.values()),
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (family == "bert")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LENGTH, model_input_names=inputs, **special
    )


def gpt2_model(end: int) -> hf.GPT2LMHeadModel:
    """An untrained GPT-2 without dropout."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, **ids)
    config.n_embd, config.n_layer, config.n_head = WIDTH, BLOCKS, HEADS
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return hf.GPT2LMHeadModel(config)


@torch.no_grad()
def bert_model(pad: int) -> hf.BertForMaskedLM:
    """An untrained BERT without dropout whose heads start by looking at near positions.

    For that, positions start as waves and queries equal to keys. With random ones, a BERT of
    this size was still at the unigram model's loss after 600 steps.
    """
    config = hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, pad_token_id=pad)
    config.hidden_size, config.num_hidden_layers, config.num_attention_heads = WIDTH, BLOCKS, HEADS
    config.intermediate_size, config.initializer_range = 4 * WIDTH, 0.05
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = hf.BertForMaskedLM(config)
    angles = torch.arange(LENGTH)[:, None] * LENGTH ** -torch.linspace(0, 1, WIDTH // 2)
    waves = 0.07 * torch.cat([angles.sin(), angles.cos()], dim=1)
    model.bert.embeddings.position_embeddings.weight.copy_(waves)
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.key.weight.copy_(attention.query.weight.normal_(std=0.2))
    return model


def encode(tokenizer: hf.PreTrainedTokenizerFast, text: list[str]) -> list[Example]:
    """GPT-2: paragraphs and end marks packed to `LENGTH`; BERT: each paragraph's pieces."""
    if tokenizer.mask_token is None:
        ids = tokenizer.backend_tokenizer.encode(END_OF_TEXT.join(text)).ids
        chunks = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
        return [{"input_ids": chunk, "labels": chunk} for chunk in chunks]
    pieces = tokenizer(text, truncation=True, max_length=LENGTH, return_overflowing_tokens=True)
    return [{"input_ids": piece} for piece in pieces["input_ids"]]


def collator(tokenizer: hf.PreTrainedTokenizerFast, **masking: float) -> Collator:
    """What makes a batch of examples: BERT's chooses 15 % of the tokens to be predicted."""
    if tokenizer.mask_token is None:
        return hf.default_data_collator
    return hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=SEED, **masking)


def fit(family: str, model: hf.PreTrainedModel, train: list[Example], collate: Collator) -> None:
    """Train the model in place; the run leaves no files."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(
            folder,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            adam_beta2=0.98,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
            **RECIPE[family],
        )
        hf.Trainer(model, arguments, data_collator=collate, train_dataset=train).train()


@torch.no_grad()
def measure(
    model: hf.PreTrainedModel, train: list[Example], held_out: list[Example], collate: Collator
) -> dict[str, float]:
    """Held-out perplexity, and that of add-one unigram counts, on the same predicted tokens."""
    shift = isinstance(model, hf.GPT2LMHeadModel)  # a chunk's first token is not predicted
    inner = slice(None) if shift else slice(1, -1)  # [CLS] and [SEP] are never masked
    seen = torch.tensor([i for example in train for i in example["input_ids"][inner]])
    unigram = (torch.bincount(seen, minlength=VOCABULARY) + 1.0).div(len(seen) + VOCABULARY).log()
    losses = []
    for start in range(0, len(held_out), 64):
        batch = collate(held_out[start : start + 64])
        labels, logits = batch.pop("labels"), model.eval()(**batch).logits
        if shift:
            labels, logits = labels[:, 1:], logits[:, :-1]
        logits, targets = logits[labels != -100], labels[labels != -100]
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        losses.append(torch.stack([loss, -unigram[targets]]).double())
    both = torch.cat(losses, dim=1)
    ours, theirs = (round(math.exp(mean), 2) for mean in both.mean(dim=1))
    return {"held_out_tokens": both.shape[1], "perplexity": ours, "unigram_perplexity": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one of the tests' tiny models.")
    parser.add_argument("family", choices=RECIPE)
    parser.add_argument("--text", type=Path, required=True, help="folder of TinyStories text")
    arguments = parser.parse_args()
    family, source = arguments.family, arguments.text
    hf.set_seed(SEED)
    text = [p for name in TRAIN_FILES for p in paragraphs(source / name)]
    tokenizer = train_tokenizer(family, text)
    model = (gpt2_model if family == "gpt2" else bert_model)(tokenizer.pad_token_id)
    train = encode(tokenizer, text)
    held_out = encode(tokenizer, paragraphs(source / HELD_OUT_FILE))
    fit(family, model, train, collator(tokenizer))
    masking = collator(tokenizer, mask_replace_prob=1.0, random_replace_prob=0.0)
    metrics = {"seed": SEED, "steps": RECIPE[family]["max_steps"]}
    metrics |= measure(model, train, held_out, masking)
    folder = Path(__file__).parent / f"tiny-{family}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (folder / "README.md").write_text(README.format(family=family, task=TASK[family], **metrics))
    print(metrics)


if __name__ == "__main__":
    main()
