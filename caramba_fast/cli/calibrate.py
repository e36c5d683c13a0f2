"""``caramba-fast calibrate``: a file with statistics of a model's keys and values."""

from __future__ import annotations

from pathlib import Path

import torch
import typer

from caramba_fast.cache.calibration import is_calibration
from caramba_fast.cli.models import check_device
from caramba_fast.cli.quality import load_subject, longest, read_text
from caramba_fast.config.files import check_replaceable
from caramba_fast.quality import calibrate

#: The first is the name to give: model folders hold .safetensors files of their own.
SUFFIXES = (".calibration", ".safetensors")


def run_calibrate(
    out: Path, name: str, text: str | None, tokens: int, device: str, *, force: bool = False
) -> None:
    """Reads the text once and writes the file.

    Raises:
        ValueError, OSError: what is wrong with the model, the text or the file to write.
    """
    check_device(device)
    if out.suffix not in SUFFIXES or not out.parent.is_dir():
        raise ValueError(f"{out} must be a {' or '.join(SUFFIXES)} file in a folder that exists")
    check_replaceable(out, "calibration", is_calibration, force=force)
    subject = load_subject(name, device)
    ids = read_text(subject, text)[:tokens]
    window = min(len(ids), longest(subject.model))
    rows = torch.from_numpy(ids[: len(ids) // max(window, 1) * window].reshape(-1, max(window, 1)))
    found = calibrate(subject.model, rows, about={"model": name, "text": text or "demo"})
    found.save(out, force=force)
    typer.echo(f"{out}: {rows.numel()} tokens, {len(found.layers)} layers")
