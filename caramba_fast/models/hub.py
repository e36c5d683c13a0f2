"""Checkpoints by their id on the Hugging Face Hub, downloaded if there is no such path."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

from caramba_fast.models.config import CheckpointError

#: ``organisation/name``, as allowed by the Hub.
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: Files to download: safetensors, settings and tokenizers; no code, no pickles, no subfolders.
FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
LEFT_OUT = ("*/*", "consolidated*")
LATEST = "main"


def local_path(name: str | Path, revision: str | None = None) -> Path:
    """The path of a checkpoint; it is downloaded if ``name`` is no existing path and looks like a Hub id.

    Args:
        name: a path, or ``organisation/name``.
        revision: a branch, tag or commit on the Hub; None for the newest.

    Raises:
        CheckpointError: the download failed, or a revision was given for a path.
        ModuleNotFoundError: huggingface_hub is missing.
    """
    path, text = Path(name), str(name)
    if path.exists() or not ID.fullmatch(text):
        if revision is not None:
            raise CheckpointError(
                f"revision is {revision!r}, and {name} is a path; revisions are of Hub ids (organisation/name)"
            )
        return path
    return _downloaded(text, revision)


def _downloaded(name: str, revision: str | None) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModuleNotFoundError(
            f"{name} does not exist here; to download it from the Hub, pip install huggingface-hub"
        )
    hub = importlib.import_module("huggingface_hub")
    try:
        found = hub.snapshot_download(
            name, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(LEFT_OUT)
        )
    except Exception as error:  # of whatever HTTP library it uses
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{name} does not exist here, and could not be downloaded from the Hub at revision "
            f"{revision or LATEST} ({type(error).__name__}: {said}); a folder, or an id in the cache, needs none"
        ) from error
    return Path(found)
