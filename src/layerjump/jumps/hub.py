"""Jumps from and to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from layerjump.errors import BadArtifact, one_line
from layerjump.jumps.serialization import TENSORS, TEXT

if TYPE_CHECKING:
    from layerjump.jumps.jumps import Jumps


def fetch(
    place: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The local folder of a folder's name or of a hub id, downloaded if need be."""
    folder, name = Path(place).expanduser(), str(place)
    looks_local = folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if folder.exists() or looks_local:
        return folder
    from huggingface_hub import snapshot_download

    with _one_line(f"{name} is neither a local folder nor jumps the hub gives us"):
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=[TENSORS, TEXT],
            )
        )


def push(
    jumps: Jumps,
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
) -> str:
    """Upload a jumps folder in one commit; returns the commit's address."""
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        jumps.save_pretrained(folder)
        with _one_line(f"the jumps cannot be uploaded to {repo_id}"):
            api = HfApi(token=token)
            made = api.create_repo(repo_id, private=private, exist_ok=True)
            return api.upload_folder(
                repo_id=made.repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=branch,
                create_pr=create_pr,
                allow_patterns=[TENSORS, TEXT],
            )


@contextmanager
def _one_line(problem: str) -> Iterator[None]:
    """The hub's client fails in many ways, some of a dozen lines; each becomes one."""
    try:
        yield
    except Exception as error:
        raise BadArtifact(
            f"{problem} ({one_line(error)}); check the name, the network and your token"
        ) from error
