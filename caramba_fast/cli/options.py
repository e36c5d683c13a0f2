"""Options that several commands share, and how errors are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

#: What a user can get wrong; shown as one line, without a traceback.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)

SAMPLING, ENDING, CACHE, SPECULATION = "Sampling", "Ending", "Cache", "Speculation"

#: Said of options that stand in a panel with some commands, and among all others with one.
BUDGET = "Most MiB of the whole cache, everything included."

Force = Annotated[
    bool, typer.Option("--force", help="Replace files of other kinds that are in the way.")
]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user got wrong as one line on stderr, exit status 1.

    Imports belong inside: ``CARAMBA_FAST_BACKEND`` is read with the first one.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # `| head` has read enough; typer ends without a word
    except USER_ERRORS as error:
        show_error(error)
        raise typer.Exit(1) from error


def show_error(error: BaseException) -> None:
    """One line on stderr: the first of the message, and the others only where that one announces them."""
    nameless = (
        "there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__
    )
    said = str(error)
    if isinstance(error, OSError) and error.strerror:  # without its number
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = said.strip().splitlines() or [nameless]
    shown = lines if lines[0].rstrip().endswith(":") else lines[:1]
    typer.secho(f"caramba-fast: {' '.join(' '.join(shown).split())}", fg="red", err=True)


Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face checkpoint folder, a .gguf file, an id on the Hub, 'demo', or 'demo:dba'."
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Of a model on the Hub: a branch, a tag or a commit.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Of the weights: float32, float16, bfloat16, or auto for what the checkpoint has."
    ),
]
Stats = Annotated[bool, typer.Option(help="Print the run's figures to stderr.")]

#: What a cache may be named, with every command.
KINDS = "fp32, fp16, bf16, q8, q4, nf4; K/V as in q8/q4; options as in q4:plain"
Cache = Annotated[
    str,
    typer.Option(help=f"{KINDS}; auto measures and chooses.", rich_help_panel=CACHE),
]
GeneratedCache = Annotated[
    str | None,
    typer.Option(
        help=f"{KINDS}; auto measures and chooses; by default fp16, or what the session has.",
        rich_help_panel=CACHE,
    ),
]
ServedCache = Annotated[
    str,
    typer.Option(
        help=f"{KINDS}; caramba-fast plan says which auto would take.", rich_help_panel=CACHE
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
        help="Compile the decode step (CPU; takes a C++ compiler, and about a minute the first time).",
    ),
]
Room = Annotated[int, typer.Option(help="Tokens the cache can hold.", rich_help_panel=CACHE)]
GeneratedRoom = Annotated[
    int | None,
    typer.Option(
        help="Tokens the cache can hold; by default 2048, or twice what the session has.",
        rich_help_panel=CACHE,
    ),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the cache, as in 2GiB; by default what all requests may need.",
        rich_help_panel=CACHE,
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--name", "--served-model-name",
        help="What clients call the model; by default as it is given here.",
    ),
]  # fmt: skip
ServedBatch = Annotated[
    int,
    typer.Option("--max-batch-size", "--max-num-seqs", help="Requests worked on at once.", min=1),
]
ServedRoom = Annotated[
    int,
    typer.Option(
        "--max-seq-len", "--max-model-len", help="Tokens of a request, prompt and answer.",
        rich_help_panel=CACHE,
    ),
]  # fmt: skip

NewTokens = Annotated[int, typer.Option(help="Tokens to write at most.", rich_help_panel=ENDING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="A text that ends the answer; repeat for several.", rich_help_panel=ENDING),
]

Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[
    int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None, typer.Option(help="Keep this much probability.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Keep tokens at least this times as likely as the likeliest.", rich_help_panel=SAMPLING
    ),
]
Penalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1 makes tokens that are in the text already less likely.",
        rich_help_panel=SAMPLING,
    ),
]
NGram = Annotated[
    int | None,
    typer.Option(help="No run of so many tokens occurs twice.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)
]
Beams = Annotated[
    int | None,
    typer.Option(
        help="Beams to search with, instead of sampling; 1 for none.", rich_help_panel=SAMPLING
    ),
]
Answers = Annotated[
    int | None, typer.Option(help="Answers to write, each whole.", rich_help_panel=SAMPLING)
]

DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="'lookup' drafts from the text itself; a folder or 'demo:dba' with a smaller model.",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(help="Tokens to draft per step. Default: 4.", rich_help_panel=SPECULATION),
]
