"""A loaded model that passed its self-check, and how to load one from a hub id, folder, GGUF file or built-in name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from layerjump.errors import BadModel, ModelNotFound, NoPredictions
from layerjump.inputs import builtin
from layerjump.inputs.anatomy import Anatomy
from layerjump.inputs.check import require_passed
from layerjump.inputs.families import Task, family_of
from layerjump.inputs.tokens import Tokens

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True)
class Model:
    """A Hugging Face model, its anatomy and its tokenizer. The model itself is never changed."""

    hf: PreTrainedModel
    anatomy: Anatomy
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
        model = cls(hf, Anatomy(hf), name, tokenizer, no_predictions, revision)
        require_passed(model)
        return model

    @property
    def n_blocks(self) -> int:
        return self.anatomy.n_blocks

    @property
    def width(self) -> int:
        return self.anatomy.width

    @property
    def task(self) -> Task:
        return self.anatomy.family.task

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
        return int(table) - self.anatomy.family.reserved_positions

    @property
    def tokens(self) -> Tokens:
        """The tokenizer, with the care this model needs."""
        if self.tokenizer is None:
            raise BadModel(f"{self.name} has no tokenizer; give one with Model.wrap(hf, tokenizer)")
        return Tokens.of(
            self.tokenizer,
            max_positions=self.max_positions,
            needs_bos=self.anatomy.family.needs_bos,
            masked=self.masked,
            both_ways=self.task in ("seq2seq", "encoder"),
            start=self._start() if self.task == "seq2seq" else None,
        )

    def encoder_side(self) -> Model:
        """An encoder–decoder's encoder: the same weights, with the encoder's blocks and levels."""
        return replace(
            self,
            anatomy=Anatomy(self.hf, encoder=True),
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
        return self.anatomy.decode(self.anatomy.to_final(states))

    def require_predictions(self) -> None:
        """Raise `NoPredictions` if the head was not in the checkpoint."""
        if self.no_predictions:
            raise NoPredictions(self.no_predictions)

    def __repr__(self) -> str:
        return f"Model({self.name}: {self.task}, {self.n_blocks} blocks, d {self.width})"


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a hub id, a folder, a GGUF file or the built-in `smollm2`, and check it.

    The device is a GPU where there is one; on a CPU the dtype is float32, elsewhere the checkpoint's own. A
    `device_map` ("auto") spreads a model larger than one device's memory, through accelerate.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = str(source)
    where: dict[str, Any] = {"revision": revision} if revision else {}
    where |= {"trust_remote_code": True} if trust_remote_code else {}
    place = _place(name, where)
    with quiet_transformers():
        config = _attempt(name, lambda: AutoConfig.from_pretrained(place, **where))
        family = family_of(config)
        hf, report = _attempt(
            name,
            lambda: getattr(transformers, CLASSES[family.task]).from_pretrained(
                place,
                dtype=_dtype(dtype, device),
                device_map=device_map,
                output_loading_info=True,
                **where,
            ),
        )
        tokenizer = _tokenizer(place, where)
    no_predictions = _missing_weights(name, hf, report["missing_keys"])
    if device_map is None:
        hf = _attempt(name, lambda: hf.to(device))
    return Model.wrap(hf, tokenizer, name=name, no_predictions=no_predictions, revision=revision)


def _place(name: str, where: dict[str, Any]) -> str:
    """Where transformers should look; a GGUF file also adds its name to the arguments."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadModel(
                f"{name} is a file, but not a .gguf; give a model folder, a GGUF file or a hub id"
            )
        where["gguf_file"] = path.name
        return str(path.parent)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"{name} has no config.json, so it is no model folder; give one, a GGUF file or a hub id (what `prune "
                f"--method linear` wrote is a model and maps: `generate`, `eval` and `prune` take it)"
            )
        return str(path)
    if name in builtin.NAMES:
        return str(builtin.folder(name))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(
            f"there is no folder or file {name}; give a model folder, a GGUF file or a hub id"
        )
    return name


def _attempt(name: str, action: Any) -> Any:
    """Loading can fail in any of four libraries' ways; each becomes one line that names the model."""
    try:
        return action()
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) and not Path(name).expanduser().exists():
            raise ModelNotFound(
                f"{name} is neither a local folder nor a model the hub gives us ({reason[:200]}); check the name, "
                f"the network, or give a local folder"
            ) from error
        raise BadModel(
            f"{name} cannot be loaded: {type(error).__name__}: {reason[:300]}"
        ) from error


def _dtype(dtype: str | None, device: str) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device == "cpu" else "auto"
    if dtype not in DTYPES:
        raise BadModel(f"dtype {dtype!r} is not known; give one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _tokenizer(place: str, where: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
    except Exception:
        return None  # many checkpoints have none; `Model.tokens` says so when text is first given
    # Where there are no tokenizer files, transformers may make one up that knows no words.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


def _missing_weights(name: str, hf: PreTrainedModel, missing: Any) -> str | None:
    """Refuse a checkpoint whose body is incomplete; say why one without its head predicts nothing."""
    # T5 has no base model: there all but the head is body.
    bodiless = hf.base_model is hf
    inside = [
        key
        for key in missing
        if key.startswith(f"{hf.base_model_prefix}.")
        or (bodiless and not key.startswith("lm_head."))
    ]
    if inside:
        raise BadModel(
            f"{name} lacks {len(inside)} weights of its body, {sorted(inside)[0]} among them; the checkpoint is "
            f"incomplete"
        )
    if not missing:
        return None
    return (
        f"{name} was saved without its prediction head ({sorted(missing)[0]} is missing), so its predictions would "
        f"be random; load a checkpoint with the head, or use only what needs none (linearity, jumps)"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and loading tables: what matters of them is checked, and raised."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
