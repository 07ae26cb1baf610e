"""How a model is loaded: from a hub id, a folder, a GGUF file or a built-in name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from layerjump.errors import BadModel, LayerjumpError, ModelNotFound, one_line
from layerjump.inputs import builtin
from layerjump.inputs.families import family_of
from layerjump.inputs.gguf import check_sizes
from layerjump.inputs.models import Model

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MOST_BLOCKS = 10_000
"""More than any model has."""
CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


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
        _require_few_blocks(name, config)
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
        _attempt(name, lambda: check_sizes(path))
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
    except LayerjumpError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not Path(name).expanduser().exists():
            near = get_close_matches(name, builtin.NAMES, n=1)
            meant = f"did you mean the built-in {near[0]}? Else check" if near else "check"
            raise ModelNotFound(
                f"{name} is neither a local folder nor a model the hub gives us ({one_line(error)}); {meant} the name, "
                f"the network, or give a local folder"
            ) from error
        raise BadModel(
            f"{name} cannot be loaded: {type(error).__name__}: {one_line(error, 300)}"
        ) from error


def _require_few_blocks(name: str, config: PretrainedConfig) -> None:
    """transformers would make blocks until the memory is full."""
    for key, value in config.to_dict().items():
        if ("layer" in key or "group" in key) and type(value) is int and value > MOST_BLOCKS:
            raise BadModel(
                f"the config.json of {name} says {key}: {str(value)[:20]}, but at most {MOST_BLOCKS:,} are made; mend "
                f"it"
            )


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
