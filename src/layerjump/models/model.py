"""Model: a Hugging Face model, its tokenizer and its structure; capture of its hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from layerjump.data.batches import Batch
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.data.token_text import token_texts
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadModel, BadText, NoPredictions, UnsupportedModel
from layerjump.models.anatomy import Pooled, Task
from layerjump.models.bos import needs_bos
from layerjump.models.discovery import ExtraInputs, StructureHints, discover
from layerjump.models.fully_sharded import hold_outer_weights
from layerjump.models.hooks import Capture
from layerjump.models.hugging_face_config import forward_arguments, reserved_positions, text_config
from layerjump.models.joint_sources import WidenedBatch, plain_sites
from layerjump.models.self_check import prove
from layerjump.models.sites import EMBEDDING, FINAL, JointSource, Site, SourceName, parse_source
from layerjump.models.structure import Structure
from layerjump.models.weight_forms import avoid_failing_kernels, execution_device
from layerjump.notebook_tables import facts_table


@dataclass(frozen=True)
class Model:
    """A Hugging Face model, its structure and its tokenizer. The model itself is never changed."""

    hf: PreTrainedModel
    structure: Structure
    name: str
    tokenizer: PreTrainedTokenizerBase | None = None
    no_predictions: str | None = None
    """Why this model cannot predict tokens; None if it can."""
    revision: str | None = None
    extra_inputs: ExtraInputs | None = None
    """Makes further arguments of the forward pass, for a model that does not run on tokens alone."""
    processor: ProcessorMixin | None = None
    """Makes the model's inputs of a text with images; None if there is none."""
    no_processor: str | None = None
    """Why the checkpoint's processor could not be loaded; None if it was, or if there is none."""

    @classmethod
    def wrap(
        cls,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str | None = None,
        no_predictions: str | None = None,
        revision: str | None = None,
        extra_inputs: ExtraInputs | None = None,
        hints: StructureHints | None = None,
        processor: ProcessorMixin | None = None,
        no_processor: str | None = None,
    ) -> Model:
        """Wrap a model that is in memory, discover its structure and run the self-check.

        Args:
            hf: A Hugging Face model, or any module whose `forward` takes token ids and returns logits.
            tokenizer: The model's tokenizer; without one, texts cannot be read.
            name: Name of the model in messages and files.
            no_predictions: Why its predictions are of no use; None if they are.
            revision: Revision of the checkpoint.
            extra_inputs: Makes further arguments of `forward` from token ids, such as an image's pixels.
            hints: What discovery cannot find by itself.
            processor: Makes the model's inputs of a text with images; its tokenizer is the default for `tokenizer`.
            no_processor: Why there is no processor, for the message when images are passed.
        """
        hf.eval()
        avoid_failing_kernels(hf)
        name = name or str(getattr(getattr(hf, "config", None), "name_or_path", "") or type(hf).__name__)
        hold_outer_weights(hf)
        structure = discover(hf, extra_inputs=extra_inputs, hints=hints)
        if structure.degree == "states":
            kind = "labels" if structure.task == "classification" else "tokens"
            no_predictions = no_predictions or f"{name} predicts no {kind}: {structure.anatomy.no_logits}"
        tokenizer = tokenizer or getattr(processor, "tokenizer", None)
        model = cls(hf, structure, name, tokenizer, no_predictions, revision, extra_inputs, processor, no_processor)
        return prove(model)

    @property
    def n_blocks(self) -> int:
        return self.structure.n_blocks

    @property
    def d_model(self) -> int:
        return self.structure.d_model

    @property
    def task(self) -> Task:
        return self.structure.task

    @property
    def masked(self) -> bool:
        return self.task == "masked"

    @property
    def pooled(self) -> Pooled | None:
        """The one position that the labels of a text come from; None if every position has its own prediction."""
        return self.structure.anatomy.pooled

    @property
    def prediction_positions(self) -> Positions:
        """Where predictions are fitted and scored unless something else is asked for."""
        if self.pooled is not None:
            return Positions.parse(self.pooled)
        return Positions.parse(MASKED_SHARE) if self.masked else Positions("all")

    @cached_property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the labels that a classification model predicts; None for other models."""
        if self.task != "classification" or self.no_predictions:
            return None
        names = getattr(getattr(self.hf, "config", None), "id2label", None) or {}
        return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(self.structure.vocab_size))

    def prediction_texts(self, ids: Sequence[int]) -> list[str]:
        """The texts of predictions: of tokens inside a text, or the names of labels."""
        if self.labels is not None:
            return [self.labels[index] for index in ids]
        return self.token_texts(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The texts of tokens inside a text; their ids if the model has no tokenizer."""
        return list(map(str, ids)) if self.tokenizer is None else token_texts(self.tokenizer, ids)

    def prediction_id(self, prediction: str | int) -> int:
        """The id of a token or label, from the id itself, from a text that is one token, or from a label's name."""
        labels, size = self.labels, self.structure.vocab_size
        if isinstance(prediction, str):
            if labels is None:
                return self.tokenization.token_id(prediction)
            if prediction not in labels:
                raise BadText(f"expected a label of {', '.join(labels)}, got {prediction!r}")
            return labels.index(prediction)
        if not 0 <= prediction < size:
            kind, whole = ("token", "vocabulary") if labels is None else ("label", "model")
            raise BadText(f"expected a {kind} id from 0 to {size - 1:,}, got {prediction}; the {whole} has {size:,}")
        return prediction

    @property
    def causal(self) -> bool:
        """Whether a state depends on no later token."""
        return self.task in ("causal", "seq2seq") and self.structure.anatomy.is_causal

    @property
    def device(self) -> torch.device:
        """The device that the model reads its tokens on."""
        return execution_device(self.hf)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.hf.parameters() if p.is_floating_point())

    @property
    def model_type(self) -> str:
        """Hugging Face's `model_type`; the class of a model that has none."""
        return str(getattr(getattr(self.hf, "config", None), "model_type", "") or type(self.hf).__name__)

    @property
    def text_config(self) -> Any:
        """The configuration of the text model: a part of an image–text model's configuration."""
        return text_config(self.hf)

    @property
    def stack(self) -> nn.Module:
        """The module that runs the blocks, once in a forward pass."""
        return self.structure.module(self.structure.anatomy.entry)

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model takes."""
        config = getattr(self.hf, "config", None)
        # ALiBi families and T5 have no position table; some of their configurations name the training length.
        fields = ("max_position_embeddings", "seq_length", "n_positions")
        sizes = [getattr(settings, name, None) for settings in (config, text_config(self.hf)) for name in fields]
        table = next((size for size in sizes if isinstance(size, int) and size > 0), 2048)
        return table - reserved_positions(self.hf)

    @cached_property
    def tokenization(self) -> Tokenization:
        """The tokenizer, with the special tokens that this model was trained to see.

        A BOS that the tokenizer has but does not add is added if the model needs it, which the first use measures.
        """
        if self.tokenizer is None:
            raise BadModel(f"{self.name} has no tokenizer; pass one to Model.wrap(hf, tokenizer)")
        tokenization = Tokenization.of(
            self.tokenizer,
            max_positions=self.max_positions,
            masked=self.masked,
            both_ways=self.task in ("seq2seq", "encoder", "classification"),
            start=self._decoder_start() if self.task == "seq2seq" else None,
        )
        return tokenization.with_bos() if needs_bos(self, tokenization) else tokenization

    def encoder_side(self) -> Model:
        """The encoder of an encoder–decoder as a model: the same weights, the encoder's blocks and levels."""
        if self.task == "seq2seq" and "input_ids" not in inspect.signature(self.hf.forward).parameters:
            raise UnsupportedModel(
                f"expected an encoder that reads tokens, got {self.name}, whose encoder reads none; use the decoder"
            )
        return replace(
            self,
            structure=discover(self.hf, encoder=True),
            name=f"{self.name} (encoder)",
            no_predictions="the encoder of an encoder–decoder predicts no tokens; use the decoder",
        )

    def run_body(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        source_ids: Tensor | None = None,
        source_mask: Tensor | None = None,
        extra_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run everything except the unembedding; hooks capture the states.

        The encoder of an encoder–decoder reads the source, its decoder the inputs. With `extra_inputs`, further
        arguments of `forward` such as pixels, the whole model runs, because its inner modules do not take them.
        """
        if extra_inputs is not None:
            batch = Batch(input_ids, attention_mask, input_ids, input_ids, input_ids, input_ids)
            self.run_whole(replace(batch, source_ids=source_ids, source_mask=source_mask, extra_inputs=extra_inputs))
            return
        if self.task == "seq2seq":
            if source_ids is None or source_mask is None:
                raise BadModel(f"{self.name} is an encoder–decoder; pass source_ids and source_mask for its encoder")
            if not self._runs_in_two:
                batch = Batch(input_ids, attention_mask, input_ids, input_ids, input_ids, input_ids)
                self.run_whole(replace(batch, source_ids=source_ids, source_mask=source_mask))
                return
            # The two stacks one by one: T5 has no base model, and as a whole it runs its unembedding too.
            mask = self._mask(source_mask)
            encoded = self.hf.get_encoder()(input_ids=source_ids.to(self.device), attention_mask=mask)
            self.stack(
                input_ids=input_ids.to(self.device),
                attention_mask=self._mask(attention_mask),
                encoder_hidden_states=encoded.last_hidden_state,
                encoder_attention_mask=mask,
                use_cache=False,
            )
            return
        # Without padding the attention kernels need no mask. But if the text contains the padding token, Hugging Face
        # would warn that the mask is missing.
        pad = getattr(self.text_config, "pad_token_id", None)
        has_pad_token = pad is not None and bool((input_ids == pad).any())
        mask = attention_mask.to(self.device) if has_pad_token else self._mask(attention_mask)
        extra = {} if self.extra_inputs is None else self.extra_inputs(input_ids)
        self.stack(**forward_arguments(self.stack, self.task, input_ids.to(self.device), mask, **extra))

    @cached_property
    def _runs_in_two(self) -> bool:
        """Whether the decoder of an encoder–decoder can be called with the encoder's states."""
        if self.extra_inputs is not None:
            return False
        parameters = inspect.signature(self.stack.forward).parameters
        needed = {"input_ids", "attention_mask", "encoder_hidden_states", "encoder_attention_mask"}
        required = {name for name, value in parameters.items() if value.default is value.empty and value.kind < 2}
        return needed <= set(parameters) and required <= needed

    def run_whole(self, batch: Batch, **options: Any) -> Any:
        """Run the whole model and return its output."""
        masks = (None if mask is None else mask.to(self.device) for mask in (batch.attention_mask, batch.source_mask))
        mask, source_mask = masks
        source = None if batch.source_ids is None else batch.source_ids.to(self.device)
        ids = batch.input_ids.to(self.device)
        if batch.extra_inputs is not None:
            options |= {name: self._moved(value) for name, value in batch.extra_inputs.items()}
        elif self.extra_inputs is not None:
            options |= self.extra_inputs(ids if source is None else source)
        return self.hf(**forward_arguments(self.hf, self.task, ids, mask, source, source_mask, **options))

    def _moved(self, value: Any) -> Any:
        """An argument on the model's device, and in its precision if it is floating-point."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)

    def _mask(self, mask: Tensor) -> Tensor | None:
        return None if bool(mask.all()) else mask.to(self.device)

    def _decoder_start(self) -> int:
        """The first token that the decoder reads; the padding token if the configuration names none, as in T5."""
        config, generation = self.hf.config, getattr(self.hf, "generation_config", None)
        for settings in (config, generation):
            if (start := getattr(settings, "decoder_start_token_id", None)) is not None:
                return int(start)
        if config.pad_token_id is None:
            raise BadModel(
                f"the configuration of {self.name} does not name the decoder's first token; set decoder_start_token_id"
            )
        return int(config.pad_token_id)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of states at level L, through the model's own final norm and unembedding."""
        self.require_predictions()
        return self.structure.decode(self.structure.to_final(states))

    def require_predictions(self) -> None:
        """Raise `NoPredictions` if the model cannot predict tokens."""
        if self.no_predictions:
            raise NoPredictions(self.no_predictions)

    def __repr__(self) -> str:
        return f"Model({self.name}: {self.task}, {self.n_blocks} blocks, d {self.d_model})"

    def _repr_html_(self) -> str:
        weights = list(self.hf.parameters())
        kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
        devices = sorted({str(weight.device) for weight in weights})
        facts = {
            "class": type(self.hf).__name__,
            "task": self.task,
            "blocks": f"{self.n_blocks}: levels 0 to {self.n_blocks}",
            "d_model": self.d_model,
            "predictions": self.no_predictions
            or f"{self.structure.vocab_size:,} {'labels' if self.labels else 'tokens'}",
            "parameters": f"{sum(weight.numel() for weight in weights):,} ({', '.join(kinds)} on {', '.join(devices)})",
            "structure proven": self.structure.degree,
        }
        return facts_table(self.name, facts)


def require_model(model: object) -> None:
    """Raise `BadModel` for anything but a `Model`, such as a bare Hugging Face model."""
    if not isinstance(model, Model):
        raise BadModel(
            f"expected a layerjump model, got a {type(model).__name__}; wrap it, lj.Model.wrap(hf, tokenizer), or load "
            f"it, lj.load(name)"
        )


@dataclass(frozen=True)
class States:
    """Hidden states of one batch: row r of every tensor belongs to pick r of the batch."""

    batch: Batch
    at: dict[Site, Tensor]
    """(picks, width of the site) by site."""
    logits: Tensor | None = None
    """(picks, vocab_size), if they were asked for."""

    def __getitem__(self, source: SourceName) -> Tensor:
        return self.at[parse_source(source)]


def capture_states(
    model: Model,
    batches: Iterable[Batch],
    sites: Sequence[SourceName],
    *,
    logits: bool = False,
    reuse_buffer_rows: int = 0,
) -> Generator[States, None, None]:
    """Yield the hidden states of each batch at the sites, for its picked positions only.

    A site may be a joint source, such as `final@-1+5`. The model runs no further than the last of the sites. `logits`
    adds the model's own logits of the picks. With `reuse_buffer_rows` (the picks of the largest batch) every batch's
    states are written over those of the last one: fresh tensors of ever new sizes would fragment the heap.
    """
    require_model(model)
    selected = [parse_source(site) for site in sites]
    is_joint = any(isinstance(site, JointSource) for site in selected)
    structure = model.structure
    last = Site(structure.n_blocks)
    plain = plain_sites(selected)
    needs_final = logits or FINAL in plain
    tapped = [site for site in plain if site not in (FINAL, EMBEDDING)]
    # A pass without a tap would run to its end, and `embedding` alone needs no pass.
    if needs_final and last not in tapped:
        tapped.append(last)
    if logits:
        model.require_predictions()
    with Capture(structure, tapped, reuse_buffer_rows=reuse_buffer_rows) as capture:
        for batch in batches:
            widened = WidenedBatch.of(batch, selected) if is_joint else None
            picked = widened.batch if widened else batch
            at = capture.run(model, picked) if tapped else {}
            own_logits = None
            with torch.no_grad():
                if needs_final:
                    at[FINAL] = structure.to_final(at[last])
                if EMBEDDING in plain:
                    at[EMBEDDING] = structure.embed(picked.input_ids[picked.row, picked.position])
                if logits:
                    final = at[FINAL]
                    own_logits = structure.decode(final[widened.rows[0].to(final.device)] if widened else final)
            joined = widened.join(at, selected) if widened else {site: at[site] for site in selected}
            states = States(batch, joined, own_logits)
            # Nothing here may hold a batch's states while the next batch runs.
            del at, joined, own_logits
            yield states
            del states
