"""Small classifiers with random weights, and one that is trained on the spot."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification

from helpers import tokenizers
from layerjump.data.corpus import Corpus, load_text
from layerjump.models.model import Model

LABELS = ("news", "story", "law")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 1100,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so that labels differ from text to text
    "pad_token_id": 1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "Bert": {},
    "Roberta": {},
    "XLMRoberta": {},
    "DistilBert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "Electra": {"embedding_size": 16},
    "DebertaV2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": "c2p|p2c"},
    "Albert": {"embedding_size": 16},
    "ModernBert": {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    "XLNet": {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3},
    "Llama": {},
}
LAST = {"XLNet", "GPT2", "Llama"}
"""Families whose head reads the last token."""


def small_classifier(family: str, head: str = "Sequence", **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {**SIZES, **FAMILIES[family], "id2label": dict(enumerate(LABELS)), **more}
    if "n_head" in FAMILIES[family] or "n_heads" in FAMILIES[family]:  # these name their sizes themselves
        unknown = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        unknown += ("max_position_embeddings",) if family == "XLNet" else ()
        settings = {name: value for name, value in settings.items() if name not in unknown}
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}For{head}Classification")(config)


def wrapped(family: str, head: str = "Sequence", **more: object) -> Model:
    words = tokenizers.llama(limit=60) if family in LAST else tokenizers.bert(limit=60)
    return Model.wrap(small_classifier(family, head, **more), words, name=family.lower())


def numbers(count: int) -> Corpus:
    return load_text([" ".join(str((i * 7 + j * j) % 900) for j in range(5 + i % 20)) for i in range(count)])


def ranges(count: int, *, seed: int = 0) -> tuple[Corpus, list[str]]:
    """Texts of numbers, most of them from one third of 0 … 899; the third is the label. Some are hard to tell."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for _ in range(count):
        label = int(torch.randint(3, (), generator=generator))
        purity = float(torch.rand((), generator=generator)) * 0.6 + 0.4
        length = int(torch.randint(6, 20, (), generator=generator))
        own = torch.rand(length, generator=generator) < purity
        third = torch.where(own, label, torch.randint(3, (length,), generator=generator))
        values = third * 300 + torch.randint(300, (length,), generator=generator)
        texts.append(" ".join(map(str, values.tolist())))
        labels.append(LABELS[label])
    return Corpus("ranges", tuple(texts), "numbers"), labels


@cache
def trained() -> Model:
    """A BERT of four blocks that tells ranges apart, trained for a few seconds."""
    torch.manual_seed(0)
    settings = {**SIZES, "num_hidden_layers": 4, "initializer_range": 0.05, "id2label": dict(enumerate(LABELS))}
    words = tokenizers.bert(limit=60)
    hf = BertForSequenceClassification(BertConfig(**settings, hidden_dropout_prob=0.0)).train()
    corpus, labels = ranges(4000, seed=1)
    optimiser = torch.optim.AdamW(hf.parameters(), lr=3e-3)
    for step in range(120):
        rows = range(step * 32 % 4000, min(step * 32 % 4000 + 32, 4000))
        batch = words([corpus.documents[row] for row in rows], padding=True, return_tensors="pt")
        targets = torch.tensor([LABELS.index(labels[row]) for row in rows])
        hf(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=targets).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return Model.wrap(hf, words, name="ranges")
