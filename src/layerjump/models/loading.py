"""Load a model from a hub id, a folder, a GGUF file or the name of the bundled model, and check it.

An error of any library becomes one line that names the model. Sizes in a config.json or GGUF file are checked before
transformers builds the model, because it would allocate whatever a damaged file states.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from layerjump.errors import BadModel, LayerjumpError, ModelNotFound, argument, one_line
from layerjump.models import bundled_model
from layerjump.models.fully_sharded import shard_fully
from layerjump.models.hugging_face_config import auto_class
from layerjump.models.model import Model
from layerjump.models.quantize_at_load import quantization_config
from layerjump.models.tensor_parallel import check_processes, spread
from layerjump.models.weight_forms import quantized_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_BLOCKS = 10_000
"""More blocks than any model has."""
LINEAR = "linear.json"
_COMPOSITES = {LINEAR: "layerjump.pruning.checkpoint:load_linear"}
"""Marker file of a folder that holds a checkpoint and more → the function that loads it, given one that loads
checkpoints. Named rather than imported: its package imports this one."""


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    offload_folder: str | Path | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    quantization: str | None = None,
    tensor_parallel: int = 1,
    fully_shard: bool = False,
    trust_remote_code: bool = False,
) -> Model:
    """Load a hub id, a folder, a GGUF file or the bundled `smollm2`, and run the self-check.

    Folders of `prune --method linear` load with their maps attached.

    Args:
        source: A hub id, a folder, a GGUF file or a bundled model.
        revision: Hub revision: a branch, tag or commit.
        device: cpu, cuda, cuda:1, … Default: a GPU where there is one.
        dtype: float32, float64, bfloat16 or float16. Default: float32 on a CPU, elsewhere the checkpoint's own.
        device_map: Spreads a model over devices through accelerate, in place of `device`: "auto", "disk" (blocks are
            read from the disk for each batch), or a mapping from modules to devices.
        offload_folder: Where weights on the disk are written to, unless the checkpoint is of safetensors, which are
            read where they are.
        max_memory: With device_map="auto", the memory to use by device: {0: "20GiB", "cpu": "60GiB"}; the rest stays
            on the disk.
        quantization: Quantises the weights as they are read: int8, nf4 or fp4 (bitsandbytes), or torchao-int8.
        tensor_parallel: Number of processes, started by torchrun, that hold one copy of the model together; with
            more processes there are several copies. Each process reads all weights into memory, then holds its part.
        fully_shard: Whether the processes of torchrun share the weights of the blocks by FSDP2: each holds a part of
            them, gathers one block at a time, and runs batches of its own. Each reads all weights into memory first.
        trust_remote_code: Whether to run code from the model's repository.
    """
    if device is not None and device_map is not None:
        raise BadModel(
            f"expected {argument('device')} or {argument('device_map')}, got both; use device for one device, "
            f"device_map for several"
        )
    if device_map == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadModel(
            f"expected no {argument('device_map', 'auto')} under torchrun, where every process would spread its model "
            f"over all devices; run one process, or spread one model over processes with {argument('tensor_parallel')}"
        )
    check_processes(tensor_parallel)
    if fully_shard and tensor_parallel > 1:
        raise BadModel(
            f"expected {argument('tensor_parallel')} or {argument('fully_shard', True)}, got both; use one of them"
        )
    load_checkpoint = partial(
        _load_checkpoint,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map={"": "disk"} if device_map == "disk" else device_map,
        offload_folder=offload_folder,
        max_memory=max_memory,
        quantization=quantization,
        tensor_parallel=tensor_parallel,
        fully_shard=fully_shard,
        trust_remote_code=trust_remote_code,
    )
    folder = Path(source).expanduser()
    for marker, loader in _COMPOSITES.items():
        if (folder / marker).is_file():
            module, _, function = loader.partition(":")
            composite: Model = getattr(import_module(module), function)(folder, load_checkpoint)
            return composite
    return load_checkpoint(source)


def _load_checkpoint(
    source: str | Path,
    *,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    device_map: str | Mapping[str, int | str] | None,
    offload_folder: str | Path | None,
    max_memory: Mapping[int | str, int | str] | None,
    quantization: str | None,
    tensor_parallel: int,
    fully_shard: bool,
    trust_remote_code: bool,
) -> Model:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = str(source)
    # Always stated: transformers would ask on the terminal otherwise.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code} | ({"revision": revision} if revision else {})
    path = _resolve(name, options)
    load_dtype = _dtype(dtype, device)
    quantized = quantization_config(quantization, load_dtype if isinstance(load_dtype, torch.dtype) else None)
    with quiet_transformers():
        config = _attempt(name, lambda: AutoConfig.from_pretrained(path, **options))
        loader = getattr(transformers, auto_class(config))
        _require_few_blocks(name, config)
        if quantized is not None or getattr(config, "quantization_config", None) is not None:
            device_map = device_map or {"": device}  # quantised weights are packed where they are read
        placement: dict[str, Any] = {"dtype": load_dtype, "device_map": device_map, "max_memory": max_memory}
        if quantized is not None:  # a None would hide the checkpoint's own, and its codes be taken for weights
            placement["quantization_config"] = quantized
        if offload_folder is not None:
            placement["offload_folder"] = str(offload_folder)
        hf, report = _attempt(
            name, lambda: loader.from_pretrained(path, output_loading_info=True, **placement, **options)
        )
        if quantized is not None and not quantized_weights(hf):
            raise BadModel(
                f"{argument('quantization', quantization)} quantises no weight of {name}, whose layers are of another "
                f"kind; use another quantization, or none"
            )
        tokenizer = _load_tokenizer(path, options)
        processor, no_processor = _load_processor(path, auto_class(config), options)
    no_predictions = _missing_weights(name, hf, report["missing_keys"])
    if tensor_parallel > 1:
        _attempt(name, lambda: spread(hf, tensor_parallel, device))
    if device_map is None:
        hf = _attempt(name, lambda: hf.to(device))
    if fully_shard:
        _attempt(name, lambda: shard_fully(hf, device))
    return Model.wrap(
        hf,
        tokenizer,
        name=name,
        no_predictions=no_predictions,
        revision=revision,
        processor=processor,
        no_processor=no_processor,
    )


def _resolve(name: str, options: dict[str, Any]) -> str:
    """The folder or hub id for transformers; a GGUF file also adds its name to the options."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadModel(f"expected a model folder, a .gguf file or a hub id, got the file {name}")
        _attempt(name, lambda: check_sizes(path))
        options["gguf_file"] = path.name
        return str(path.parent)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"expected a model folder, a GGUF file or a hub id, got {name}, which has no config.json"
            )
        return str(path)
    if name in bundled_model.NAMES:
        return str(bundled_model.bundled_folder(name))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"{name} does not exist; pass a model folder, a GGUF file or a hub id")
    return name


def _attempt(name: str, action: Any) -> Any:
    """Run a step of loading; raise the error of whichever library fails as one line that names the model."""
    try:
        return action()
    except LayerjumpError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not Path(name).expanduser().exists():
            near = get_close_matches(name, bundled_model.NAMES, n=1)
            hint = f"did you mean the bundled {near[0]}? Otherwise check" if near else "check"
            raise ModelNotFound(
                f"{name} is neither a local folder nor a model on the hub ({one_line(error)}); {hint} the name and the "
                f"network, or pass a local folder"
            ) from error
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise BadModel(
                f"{name} brings code of its own, which is not run unless you allow it; read it, then pass "
                f"{argument('trust_remote_code')}"
            ) from error
        raise BadModel(f"{name} cannot be loaded: {type(error).__name__}: {one_line(error, 300)}") from error


def _require_few_blocks(name: str, config: PretrainedConfig) -> None:
    """Raise `BadModel` for an absurd number of blocks: transformers would build them until memory is full."""
    for key, value in config.to_dict().items():
        if ("layer" in key or "group" in key) and type(value) is int and value > MAX_BLOCKS:
            raise BadModel(
                f"expected at most {MAX_BLOCKS:,} blocks in the config.json of {name}, got {key}: {str(value)[:20]}; "
                f"correct it"
            )


def _dtype(dtype: str | None, device: str) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device == "cpu" else "auto"
    if dtype not in DTYPES:
        raise BadModel(f"expected {argument('dtype')} of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def _load_tokenizer(path: str, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except Exception:
        return None  # many checkpoints have none; `Model.tokenization` raises when text is first used
    # Without tokenizer files, transformers may return a tokenizer that has no words.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def _load_processor(path: str, loader: str, options: dict[str, Any]) -> tuple[ProcessorMixin | None, str | None]:
    """The processor of a checkpoint that has one, or why it cannot be loaded; text needs none."""
    folder = Path(path)
    if folder.is_dir():
        has_one = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    else:
        has_one = loader == "AutoModelForImageTextToText"
    if not has_one:
        return None, None
    try:
        processor = AutoProcessor.from_pretrained(path, **options)
    except Exception as error:  # such as a missing library of images
        return None, one_line(error)
    # Without a processor of its type, transformers returns a tokenizer or an image processor.
    return (processor, None) if isinstance(processor, ProcessorMixin) else (None, None)


def _missing_weights(name: str, hf: PreTrainedModel, missing: Any) -> str | None:
    """Raise `BadModel` if weights of the body are missing; say why a checkpoint without its head cannot predict."""
    # T5 has no base model: all but its unembedding counts as body.
    bodiless = hf.base_model is hf
    inside = [
        key
        for key in missing
        if key.startswith(f"{hf.base_model_prefix}.") or (bodiless and not key.startswith("lm_head."))
    ]
    if inside:
        raise BadModel(
            f"{name} lacks {len(inside)} weights of its body, such as {sorted(inside)[0]}; the checkpoint is incomplete"
        )
    if not missing:
        return None
    return (
        f"{name} was saved without its prediction head ({sorted(missing)[0]} is missing), so its predictions would "
        f"be random; load a checkpoint with the head, or use only functions without predictions (linearity, jumps)"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and loading tables; the problems that they report are checked and raised."""
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


_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a GGUF value → its size in bytes; the other two types are strings and lists."""
_STRING, _LIST = 8, 9
_MAX_ENTRIES = 4_000_000
"""Limit of the entries of a list: ten times those of the largest vocabulary."""


def check_sizes(path: Path) -> None:
    """Raise `BadModel` if the metadata of a GGUF file do not match its tensors, before a model is built.

    For a missing size transformers would assume that of a large model, build it, and only then miss the weights.
    """
    from gguf import GGUFReader

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data, path).check()
    reader = GGUFReader(path)
    family = _stated(reader, "general.architecture", path)
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    sizes = {
        "block_count": 1 + max((_block(name) for name in shapes), default=-1),
        "embedding_length": _width(shapes, "token_embd.weight", 0),
        "feed_forward_length": _width(shapes, "blk.0.ffn_up.weight", 1),
    }
    for name, size in sizes.items():
        if size is None:
            continue
        stated = _stated(reader, f"{family}.{name}", path)
        if stated != size:
            raise BadModel(
                f"{path} states {family}.{name} {stated!r}, but its tensors have {size}: it is incomplete; get it again"
            )
    # transformers builds a table of this size before it compares anything.
    rope = reader.get_field(f"{family}.rope.dimension_count")
    width = sizes["embedding_length"]
    if rope is not None and width is not None and not 0 <= int(rope.contents()) <= width:
        raise BadModel(
            f"{path} states {family}.rope.dimension_count {rope.contents()}, but the model is {width} wide: it is "
            f"damaged; get it again"
        )


class _Header:
    """Checks that every length in the metadata of a GGUF file lies within the file.

    The reader itself would iterate over a list of a trillion entries beyond the end of the file.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 4  # after the magic number
        self._order = "<"

    def check(self) -> None:
        if self._number("I") & 0xFFFF == 0:  # the version, in the other byte order
            self._order = ">"
        self._number("Q")  # tensors
        for _ in range(self._count(least=8)):
            self._skip(self._count(least=1))
            self._pass(self._number("I"))

    def _pass(self, kind: int, inside: int = 0) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind])
        elif kind == _STRING:
            self._skip(self._count(least=1))
        elif kind == _LIST and inside < 4:
            entries = self._number("I")
            count = self._count(least=_SCALARS.get(entries, 8))
            if count > _MAX_ENTRIES:
                self._damaged(f"a list has {count:,} entries")
            if entries in _SCALARS:
                self._skip(count * _SCALARS[entries])
                return
            for _ in range(count):
                self._pass(entries, inside + 1)
        else:
            self._damaged(f"a value has the type {kind}")

    def _count(self, least: int) -> int:
        """Read the number of entries of at least `least` bytes each."""
        count = self._number("Q")
        if count * least > len(self._data) - self._at:
            self._damaged(f"{count:,} entries cannot be in {len(self._data):,} bytes")
        return count

    def _number(self, kind: str) -> int:
        form = struct.Struct(self._order + kind)
        start = self._at
        self._skip(form.size)
        return int(form.unpack_from(self._data, start)[0])

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            self._damaged("it ends within its first part")

    def _damaged(self, reason: str) -> NoReturn:
        raise BadModel(f"{self._path} is cut short or damaged: {reason}; get it again")


def _stated(reader: object, key: str, path: Path) -> object:
    field = reader.get_field(key)  # type: ignore[attr-defined]
    if field is None:
        raise BadModel(f"{path} does not state {key}: it is incomplete, or holds no language model; give another file")
    return field.contents()


def _block(name: str) -> int:
    """The number in blk.7.attn_q.weight; −1 where there is none."""
    start, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if start == "blk" and number.isdecimal() else -1


def _width(shapes: dict[str, list[int]], name: str, axis: int) -> int | None:
    shape = shapes.get(name, [])
    return shape[axis] if axis < len(shape) else None
