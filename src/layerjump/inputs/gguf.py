"""The sizes that a GGUF file states, held against its tensors before a model of those sizes is built."""

from __future__ import annotations

from pathlib import Path

from layerjump.errors import BadModel


def check_sizes(path: Path) -> None:
    """Refuse a file that leaves out a size, or has fewer blocks than it says.

    transformers would put in the size of a large model, take its time to build that, and only then miss the weights.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    family = _stated(reader, "general.architecture", path)
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    found = {
        "block_count": 1 + max((_block(name) for name in shapes), default=-1),
        "embedding_length": _width(shapes, "token_embd.weight", 0),
        "feed_forward_length": _width(shapes, "blk.0.ffn_up.weight", 1),
    }
    for name, size in found.items():
        if size is None:
            continue
        stated = _stated(reader, f"{family}.{name}", path)
        if stated != size:
            raise BadModel(
                f"{path} states {family}.{name} {stated!r}, but its tensors have {size}: it is incomplete; "
                f"get it again"
            )
    # A table is made of so many angles before anything is compared with them.
    rope = reader.get_field(f"{family}.rope.dimension_count")
    width = found["embedding_length"]
    if rope is not None and width is not None and not 0 <= int(rope.contents()) <= width:
        raise BadModel(
            f"{path} states {family}.rope.dimension_count {rope.contents()}, but the model is {width} wide: it is "
            f"damaged; get it again"
        )


def _stated(reader: object, key: str, path: Path) -> object:
    field = reader.get_field(key)  # type: ignore[attr-defined]
    if field is None:
        raise BadModel(
            f"{path} does not state {key}: it is incomplete, or holds no language model; give another file"
        )
    return field.contents()


def _block(name: str) -> int:
    """The number in blk.7.attn_q.weight; −1 where there is none."""
    start, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if start == "blk" and number.isdecimal() else -1


def _width(shapes: dict[str, list[int]], name: str, axis: int) -> int | None:
    shape = shapes.get(name, [])
    return shape[axis] if axis < len(shape) else None
