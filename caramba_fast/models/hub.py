"""Checkpoints by their id on the Hugging Face Hub: downloaded when a path does not exist and reads like one."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

from caramba_fast.models.config import CheckpointError

#: ``organisation/name``, as the Hub allows it.
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: What is downloaded: weights as safetensors, settings and tokenizers; no code, no pickles, nothing of subfolders.
FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
LEFT_OUT = ("*/*", "consolidated*")
LATEST = "main"


def local_path(name: str | Path, revision: str | None = None) -> Path:
    """The path of a checkpoint, which is downloaded if ``name`` is no path that exists and reads like a Hub id.

    Args:
        name: a path, or ``organisation/name``.
        revision: a branch, a tag or a commit on the Hub; None for the newest.

    Raises:
        CheckpointError: it could not be downloaded, or a revision of a path.
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
