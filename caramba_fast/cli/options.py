"""Options that several commands share, and how errors are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

#: What a user can get wrong; shown as one line, without a traceback.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)

SAMPLING, ENDING, CACHE, SPECULATION = "Sampling", "Ending", "Cache", "Speculation"

#: Help of an option that has a panel with some commands, and none with others.
BUDGET = "Memory limit of the whole cache, in MiB."

Force = Annotated[
    bool, typer.Option("--force", help="Also overwrite files that this command did not write.")
]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user got wrong as one line on stderr, exit status 1.

    Imports belong inside: ``CARAMBA_FAST_BACKEND`` is read with the first one.
    """
    try:
        # torch loads numpy from C++, which would drop an interrupt that comes in the middle of it.
        import numpy  # noqa: F401, PLC0415 - see above

        yield
    except BrokenPipeError:
        raise  # `| head` has read enough; typer ends without a word
    except USER_ERRORS as error:
        if _of_an_interrupt(error):  # a library that was loading made another error of it
            raise KeyboardInterrupt from error
        show_error(error)
        raise typer.Exit(1) from error


def _of_an_interrupt(error: BaseException | None) -> bool:
    seen = set[int]()  # a chain may go round
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def show_error(error: BaseException) -> None:
    """One line on stderr: the first of the message, and the others only where that one announces them."""
    from pydantic import ValidationError  # noqa: PLC0415 - takes longer than --help

    from caramba_fast.config.files import explain  # noqa: PLC0415 - as above

    nameless = (
        "there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__
    )
    said = str(error)
    if isinstance(error, ValidationError):
        said = explain(error)
    if isinstance(error, OSError) and error.strerror:  # without its number
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = said.strip().splitlines() or [nameless]
    shown = lines if lines[0].rstrip().endswith(":") else lines[:1]
    typer.secho(f"caramba-fast: {' '.join(' '.join(shown).split())}", fg="red", err=True)


Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face checkpoint folder, a .gguf file, a Hub id, 'demo', or 'demo:dba'."
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of the weights: float32, float16, bfloat16, or auto (as in the checkpoint)."
    ),
]
Stats = Annotated[bool, typer.Option(help="Print speed and cache figures to stderr.")]

#: The names of caches, in every command.
KINDS = "fp32, fp16, bf16, q8, q4, nf4; K/V as in q8/q4; options as in q4:plain"
Cache = Annotated[
    str,
    typer.Option(help=f"{KINDS}; auto measures and chooses.", rich_help_panel=CACHE),
]
GeneratedCache = Annotated[
    str | None,
    typer.Option(
        help=f"{KINDS}; auto measures and chooses; default: fp16, or the session's.",
        rich_help_panel=CACHE,
    ),
]
ServedCache = Annotated[
    str,
    typer.Option(
        help=f"{KINDS}; see caramba-fast plan for what auto would choose.", rich_help_panel=CACHE
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(help=BUDGET, rich_help_panel=CACHE),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the decode step (CPU; needs a C++ compiler, and about a minute the first time per batch size).",
    ),
]
Room = Annotated[int, typer.Option(help="Cache capacity in tokens.", rich_help_panel=CACHE)]
GeneratedRoom = Annotated[
    int | None,
    typer.Option(
        help="Cache capacity in tokens; default: 2048, or twice the session's tokens.",
        rich_help_panel=CACHE,
    ),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the cache, such as 2GiB; default: room for --max-batch-size requests of full length.",
        rich_help_panel=CACHE,
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--name", "--served-model-name",
        help="Model name in the API; default: MODEL.",
    ),
]  # fmt: skip
ServedBatch = Annotated[
    int,
    typer.Option("--max-batch-size", "--max-num-seqs", help="Requests that run at once.", min=1),
]
ServedRoom = Annotated[
    int,
    typer.Option(
        "--max-seq-len", "--max-model-len", help="Tokens per request, prompt and answer together.",
        rich_help_panel=CACHE,
    ),
]  # fmt: skip

NewTokens = Annotated[
    int, typer.Option(help="Maximum number of tokens to generate.", rich_help_panel=ENDING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Stop string; repeat for several.", rich_help_panel=ENDING),
]

Temperature = Annotated[
    float, typer.Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING)
]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k likeliest tokens.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens with this total probability.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this fraction of the likeliest token's probability.",
        rich_help_panel=SAMPLING,
    ),
]
Penalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1, tokens already in the text become less likely.",
        rich_help_panel=SAMPLING,
    ),
]
NGram = Annotated[
    int | None,
    typer.Option(help="No n-gram of this length may repeat.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)
]
Beams = Annotated[
    int | None,
    typer.Option(
        help="Beam search with this many beams, instead of sampling; 1 for none.",
        rich_help_panel=SAMPLING,
    ),
]
Answers = Annotated[
    int | None,
    typer.Option(help="Number of answers, each printed once complete.", rich_help_panel=SAMPLING),
]

DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Speculative decoding: 'lookup' (prompt lookup), or a draft model (folder or 'demo:dba').",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(help="Draft tokens per step. Default: 4.", rich_help_panel=SPECULATION),
]
