"""The command line: ``caramba-fast demo``, ``generate``, ``chat``, ``plan``, ``quality``, ``run``, …."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings

#: Environment variables that silence libraries' messages on stderr; those already set are kept.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
#: Loggers with irrelevant warnings when transformers imports torchao (other devices, torch internals).
TALKATIVE = ("torchao", "torch.utils._pytree")
#: Modules the commands import -> package to install.
NEEDED = {"typer": "typer", "rich": "rich", "tokenizers": "tokenizers", "yaml": "pyyaml"}
#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130


def main() -> None:
    """Entry point of ``caramba-fast``; says what to install if the extra is missing."""
    missing = [package for name, package in NEEDED.items() if not _installed(name)]
    if missing:
        sys.exit(
            f"caramba-fast: the command line needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed: nothing to read, nobody to write to
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer says which byte is no text
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does what its encoding lacks
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    try:
        from caramba_fast.cli.app import app  # noqa: PLC0415 - only with the extra

        app()
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(INTERRUPTED)
    except OSError as error:  # --help and --version are no commands
        from caramba_fast.cli.options import show_error  # noqa: PLC0415 - as above

        show_error(error)
        sys.exit(1)


def _installed(name: str) -> bool:
    import importlib.util  # noqa: PLC0415

    return importlib.util.find_spec(name) is not None
