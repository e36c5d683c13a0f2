"""``caramba-fast bench``: the benchmarks of the package, each with the options of its own module."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from caramba_fast.cli.options import Force, one_line_errors

bench = typer.Typer(
    help="Benchmark ops, a whole model, generation, speculation and serving on this machine.",
    no_args_is_help=True,
)
PACKAGE = "caramba_fast.bench"
#: A benchmark parses its own options.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Out = Annotated[Path | None, typer.Option(help="CSV file to write.")]
OutWithDetails = Annotated[
    Path | None,
    typer.Option(
        help="CSV file to write, and a JSON file beside it, not replaced if another command wrote it."
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 for torch's default.", min=0)]
TimeLimit = Annotated[
    float | None, typer.Option(help="Start no new measurement after this many seconds.", min=0)
]


@bench.command()
def ops(
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, about a minute.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    grid: Annotated[
        str | None, typer.Option(help="tiny, quick, cpu, core, …; default: cpu, or core on cuda.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, or one backend for every op.")] = "auto",
    threads: Threads = 0,
    time_limit: TimeLimit = None,
    out: OutWithDetails = None,
    force: Force = False,
) -> None:
    """Compare each op with torch: predicted, verified, timed, as a share of memory bandwidth."""
    _run("kernels.run", _words(
        device=device, backend=backend, threads=threads, quick=quick, grid=grid, time_limit=time_limit,
        out=out, force=force,
    ))  # fmt: skip


@bench.command()
def model(
    quick: Annotated[
        bool, typer.Option("--quick", help="One small configuration, a few seconds.")
    ] = False,
    context: Annotated[
        list[int] | None, typer.Option(help="Cached tokens; repeat for several.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; repeat for several.")] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="Cache to time; repeat for several. Compared with the first."),
    ] = None,
    threads: Threads = 0,
    time_limit: TimeLimit = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Time decode steps of a whole model (random weights, CPU) with each cache in turn."""
    small: dict[str, int] = {}
    if quick:
        small, context, batch = dict(head_dims=64, rounds=3), context or [1024], batch or [1]
    _run("generation.decode_model", _words(
        threads=threads, **small, contexts=context, batches=batch, kinds=cache, time_limit=time_limit,
        out=out, force=force,
    ))  # fmt: skip


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def generation(context: typer.Context) -> None:
    """Time generation with and without a cache, by length and kind. --help lists its options."""
    _run("generation.generation", context.args)


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def speculation(context: typer.Context) -> None:
    """Measure acceptance, tokens per pass and speedup of drafts. --help lists its options."""
    _run("generation.speculation", context.args)


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Compare the engine with static batches and transformers on a fixed load. --help lists its options."""
    _run("serving.serve", context.args)


def _words(**options: Any) -> list[str]:
    """Options as a command line has them: a flag for True; None, False and empty lists are left out."""
    found: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        if values and value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}", *(str(v) for v in values if v is not True)]
    return found


def _run(name: str, arguments: list[str]) -> None:
    """Calls ``main(arguments)`` of a benchmark's module and ends with its status."""
    with one_line_errors():
        try:
            module = importlib.import_module(f"{PACKAGE}.{name}")
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith(PACKAGE):
                raise ModuleNotFoundError(
                    f"this installation has no {error.name}; it is part of the source tree's bench/"
                ) from error
            raise ModuleNotFoundError(
                f"this benchmark needs {error.name}: pip install {str(error.name).partition('.')[0]}"
            ) from error
        status = module.main(arguments)
    raise typer.Exit(status or 0)
