"""The commands and their options; what they do is in a module each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="caramba-fast",
    help="Decode from quantized KV caches that are read as they are stored.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

#: What a user can get wrong; shown as one line, without a traceback.
USER_ERRORS = (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError, RuntimeError)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user got wrong as one line on stderr, exit status 1.

    Imports belong inside: ``CARAMBA_FAST_BACKEND`` is read with the first one.
    """
    try:
        yield
    except USER_ERRORS as error:
        typer.secho(f"caramba-fast: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.command()
def demo(
    tokens: Annotated[
        int, typer.Option(help="Tokens of held-out text to measure quality on.", min=512)
    ] = 8192,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write with each cache.", min=2)] = 48,
) -> None:
    """A trained model writes from fp16, q8, q4 and nf4 caches: what each saves and costs."""
    with one_line_errors():
        from caramba_fast.cli.demo import run_demo  # noqa: PLC0415

        run_demo(quality_tokens=tokens, new_tokens=new_tokens)


@app.command()
def doctor() -> None:
    """Versions, device, and which backend serves which op, with the reason why others do not."""
    with one_line_errors():
        from caramba_fast.cli.doctor import run_doctor  # noqa: PLC0415

        run_doctor()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads standard input.")],
    model: Annotated[
        str, typer.Option(help="A Hugging Face checkpoint folder, or 'demo'.")
    ] = "demo",
    cache: Annotated[
        str,
        typer.Option(
            help="fp32, fp16, bf16, q8, q4, nf4; K/V as in q8/q4; options as in q4:plain."
        ),
    ] = "fp16",
    calibration: Annotated[
        Path | None, typer.Option(help="A file made by 'caramba-fast calibrate' for this model.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this much probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_seq_len: Annotated[int, typer.Option(help="Tokens the cache can hold.")] = 2048,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    stats: Annotated[bool, typer.Option(help="Print the run's figures to stderr.")] = True,
) -> None:
    """Continues PROMPT, token by token."""
    settings = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        max_seq_len=max_seq_len, cache_kind=cache, cache_calibration=calibration,
    )  # fmt: skip
    with one_line_errors():
        from caramba_fast.cli.generate import run_generate  # noqa: PLC0415

        text = sys.stdin.read() if prompt == "-" else prompt
        run_generate(text, None if model == "demo" else Path(model), settings, device, stats)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(help="The file to write, a .safetensors file.")],
    model: Annotated[
        str, typer.Option(help="A Hugging Face checkpoint folder, demo:gqa or demo:dba.")
    ] = "demo:gqa",
    text: Annotated[
        str | None,
        typer.Option(help="A text file like what the model will read; demo models need none."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of it to read.", min=64)] = 2048,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
) -> None:
    """Measures a model's keys and values, so that caches need not learn their constants from a prompt."""
    with one_line_errors():
        from caramba_fast.cli.calibrate import run_calibrate  # noqa: PLC0415

        run_calibrate(out, model, text, tokens, device)


@app.command()
def quality(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face checkpoint folder, demo:gqa, demo:dba, or a hard variant such as "
            "demo:gqa/outliers-8."
        ),
    ] = "demo:gqa",
    text: Annotated[
        str | None,
        typer.Option(
            help="A text file to measure on, or 'demo', which demo models need not be told."
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="A cache to measure, as in q4 or q8/q4; repeat for several."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="The cache to compare with.")] = "fp16",
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a text window; repeat for several. Default: 1024."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text at each context.")] = 16384,
    needles: Annotated[int, typer.Option(help="Needles at each context; 0 for none.")] = 1024,
    calibrate: Annotated[
        bool,
        typer.Option(help="Take the transforms' constants from the first 2048 tokens of the text."),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the table, the plot, and parts to resume from."),
    ] = None,
) -> None:
    """What each cache costs a model: loss, KL, top token, acceptance, needles, with intervals."""
    with one_line_errors():
        from caramba_fast.cli.quality import run_quality  # noqa: PLC0415

        run_quality(
            model, text, cache or (), context or (), out, baseline=baseline, tokens=tokens,
            needles=needles, calibrated=calibrate, device=device,
        )  # fmt: skip
