"""Model: a Hugging Face model, its tokenizer and its structure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadModel, NoPredictions
from layerjump.models.families import Task
from layerjump.models.self_check import require_passed
from layerjump.models.structure import Structure


@dataclass(frozen=True)
class Model:
    """A Hugging Face model, its anatomy and its tokenizer. The model itself is never changed."""

    hf: PreTrainedModel
    structure: Structure
    name: str
    tokenizer: PreTrainedTokenizerBase | None = None
    no_predictions: str | None = None
    """Why this model must not be asked for predictions, if it must not."""
    revision: str | None = None

    @classmethod
    def wrap(
        cls,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str | None = None,
        no_predictions: str | None = None,
        revision: str | None = None,
    ) -> Model:
        """Take a Hugging Face model already in memory, after the self-check."""
        hf.eval()
        name = name or str(hf.config.name_or_path)
        model = cls(hf, Structure(hf), name, tokenizer, no_predictions, revision)
        require_passed(model)
        return model

    @property
    def n_blocks(self) -> int:
        return self.structure.n_blocks

    @property
    def d_model(self) -> int:
        return self.structure.d_model

    @property
    def task(self) -> Task:
        return self.structure.family.task

    @property
    def masked(self) -> bool:
        return self.task == "masked"

    @property
    def causal(self) -> bool:
        """Whether a state depends on no later token."""
        return self.task in ("causal", "seq2seq")

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def stack(self) -> nn.Module:
        """The module that runs the blocks, once a forward pass."""
        if self.task == "seq2seq":
            return self.hf.get_decoder()
        return self.hf.get_encoder() if self.task == "encoder" else self.hf.base_model

    @property
    def max_positions(self) -> int:
        config = self.hf.config
        # ALiBi families and T5 have no position table; they say what they were trained on, or else nothing.
        fields = ("max_position_embeddings", "seq_length", "n_positions")
        table = next((size for name in fields if (size := getattr(config, name, None))), 2048)
        return int(table) - self.structure.family.reserved_positions

    @property
    def tokenization(self) -> Tokenization:
        """The tokenizer, with the care this model needs."""
        if self.tokenizer is None:
            raise BadModel(f"{self.name} has no tokenizer; give one with Model.wrap(hf, tokenizer)")
        return Tokenization.of(
            self.tokenizer,
            max_positions=self.max_positions,
            needs_bos=self.structure.family.needs_bos,
            masked=self.masked,
            both_ways=self.task in ("seq2seq", "encoder"),
            start=self._start() if self.task == "seq2seq" else None,
        )

    def encoder_side(self) -> Model:
        """An encoder–decoder's encoder: the same weights, with the encoder's blocks and levels."""
        return replace(
            self,
            structure=Structure(self.hf, encoder=True),
            name=f"{self.name} (encoder)",
            no_predictions="an encoder beside a decoder predicts no tokens itself; ask the decoder",
        )

    def body(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        source_ids: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> None:
        """Run everything but the vocabulary product (hooks do the reading).

        An encoder–decoder's encoder reads the source, its decoder the inputs.
        """
        if self.task == "seq2seq":
            if source_ids is None or source_mask is None:
                raise BadModel(
                    f"{self.name} is an encoder–decoder, but there is nothing for its encoder to read; give source_ids "
                    f"and source_mask"
                )
            self._encode_and_decode(input_ids, attention_mask, source_ids, source_mask)
            return
        # Without padding the attention kernels need no mask at all; but where the text itself holds the
        # padding's id, Hugging Face warns of a forgotten one.
        pad = getattr(self.hf.config, "pad_token_id", None)
        looks_padded = pad is not None and bool((input_ids == pad).any())
        mask = attention_mask.to(self.device) if looks_padded else self._mask(attention_mask)
        extra = {"use_cache": False} if self.task == "causal" else {}
        self.stack(input_ids=input_ids.to(self.device), attention_mask=mask, **extra)

    def _encode_and_decode(
        self, input_ids: Tensor, attention_mask: Tensor, source_ids: Tensor, source_mask: Tensor
    ) -> None:
        # The two stacks by themselves: the whole of T5, which has no base model, would run its head too.
        read = self._mask(source_mask)
        encoded = self.hf.get_encoder()(input_ids=source_ids.to(self.device), attention_mask=read)
        self.stack(
            input_ids=input_ids.to(self.device),
            attention_mask=self._mask(attention_mask),
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=read,
            use_cache=False,
        )

    def _mask(self, mask: Tensor) -> Tensor | None:
        return None if bool(mask.all()) else mask.to(self.device)

    def _start(self) -> int:
        """The token that the decoder reads first; where none is named it is the padding, as T5's is."""
        config, generation = self.hf.config, getattr(self.hf, "generation_config", None)
        for said in (config, generation):
            if (start := getattr(said, "decoder_start_token_id", None)) is not None:
                return int(start)
        if config.pad_token_id is None:
            raise BadModel(
                f"{self.name} does not say what its decoder reads first; set decoder_start_token_id in its config"
            )
        return int(config.pad_token_id)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of states at level L, by the model's own norm and head."""
        self.require_predictions()
        return self.structure.decode(self.structure.to_final(states))

    def require_predictions(self) -> None:
        """Raise `NoPredictions` if the head was not in the checkpoint."""
        if self.no_predictions:
            raise NoPredictions(self.no_predictions)

    def __repr__(self) -> str:
        return f"Model({self.name}: {self.task}, {self.n_blocks} blocks, d {self.d_model})"


def require_model(given: object) -> None:
    """Refuse what is not a `Model`, first of all a bare Hugging Face one."""
    if not isinstance(given, Model):
        raise BadModel(
            f"a {type(given).__name__} was given, but a layerjump model was wanted; wrap it, lj.Model.wrap(hf, "
            f"tokenizer), or load it by lj.load(name)"
        )
