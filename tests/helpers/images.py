"""Processors of image–text models with a small tokenizer and small images, made without a hub and without Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerFast, ProcessorMixin, processing_utils
from transformers.image_processing_base import BatchFeature, ImageProcessingMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.processing_utils import ImagesKwargs

from helpers import tokenizers

IMAGE = "<image>"
PLACEHOLDERS = {"image_token": IMAGE, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}


class SmallImagesKwargs(ImagesKwargs, total=False):
    """Options that Gemma 3's processor passes on."""

    do_pan_and_scan: bool | None
    pan_and_scan_min_crop_size: int | None
    pan_and_scan_max_num_crops: int | None
    pan_and_scan_min_ratio_to_activate: float | None


class SmallImageProcessor(BaseImageProcessor):
    """Images as (3, side, side) pixels from −1 to 1."""

    model_input_names = ["pixel_values"]
    valid_kwargs = SmallImagesKwargs

    def __init__(self, side: int = 28, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.side = side

    def __call__(self, images: Any, return_tensors: Any = None, **kwargs: Any) -> BatchFeature:
        flat = [image for entry in images for image in (entry if isinstance(entry, list) else [entry])]
        pixels = [torch.as_tensor(np.asarray(image)).float().permute(2, 0, 1)[None] / 127.5 - 1 for image in flat]
        resized = [torch.nn.functional.interpolate(image, size=(self.side, self.side))[0] for image in pixels]
        return BatchFeature({"pixel_values": torch.stack(resized), "num_crops": [0] * len(flat)})


class SmallImagesConfig(PretrainedConfig):
    model_type = "small_images"


AutoImageProcessor.register(SmallImagesConfig, image_processor_classes={"pil": SmallImageProcessor}, exist_ok=True)


def image_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and the placeholders of images."""
    backend = tokenizers.llama().backend_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="[UNK]",
        extra_special_tokens=PLACEHOLDERS,
    )


def random_image(seed: int, size: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def make_processor(name: str, side: int, **settings: Any) -> ProcessorMixin:
    """A processor class of transformers with the small tokenizer and image processor."""
    # Without Pillow transformers offers a stand-in under this name, which its processors would check against.
    processing_utils.transformers_module.ImageProcessingMixin = ImageProcessingMixin
    return getattr(transformers, name)(SmallImageProcessor(side), image_tokenizer(), **settings)
