"""The commands and their options. What a command does is in a module of its own, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from caramba_fast import __version__
from caramba_fast.cli import options as o
from caramba_fast.cli.bench import bench

app = typer.Typer(
    name="caramba-fast",
    help="Text generation with quantized KV caches and fused attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
#: Default limit of a prefix store.
STORE_SIZE = "4GiB"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"caramba-fast {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options without a command."""


@app.command()
def demo(
    tokens: Annotated[
        int, typer.Option(help="Tokens of held-out text for the quality measurement.", min=512)
    ] = 8192,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate per cache.", min=2)] = 48,
    long_context: Annotated[
        bool,
        typer.Option(
            help="Also compare transformers at 8k and 32k tokens, with its own cache and with ours."
        ),
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Plot speed and bytes by context: a .png or .svg file.")
    ] = None,
) -> None:
    """Compare caches on two small trained models: speed, bytes, quality."""
    with o.one_line_errors():
        from caramba_fast.cli.demo import run_demo  # noqa: PLC0415

        run_demo(tokens, new_tokens, long_context=long_context, picture=plot)


@app.command()
def doctor(
    report: Annotated[
        bool, typer.Option("--report", help="Print plain text for a bug report.")
    ] = False,
) -> None:
    """Show versions, the device, and which backend runs each op, and why others do not."""
    with o.one_line_errors():
        if report:
            from caramba_fast.cli import report as bug  # noqa: PLC0415

            typer.echo(bug.report())
            return
        from caramba_fast.cli.doctor import run_doctor  # noqa: PLC0415

        run_doctor()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads standard input.")],
    model: o.Model = "demo",
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    revision: o.Revision = None,
    compile: o.Compile = False,
    stats: o.Stats = True,
    cache: o.GeneratedCache = None,
    budget_mb: o.Budget = None,
    max_seq_len: o.GeneratedRoom = None,
    max_new_tokens: o.NewTokens = 64,
    stop: o.Stop = None,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Penalty = None,
    no_repeat_ngram_size: o.NGram = None,
    seed: o.Seed = None,
    num_beams: o.Beams = None,
    num_return_sequences: o.Answers = None,
    draft: o.DraftModel = None,
    spec_k: o.DraftLength = None,
    session: Annotated[
        Path | None,
        typer.Option(
            help="Session file: continued if it exists, and saved afterwards.",
            rich_help_panel=o.CACHE,
        ),
    ] = None,
) -> None:
    """Generate text that continues PROMPT."""
    settings = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, no_repeat_ngram_size=no_repeat_ngram_size,
        stop=tuple(stop) if stop else None, num_beams=num_beams, num_return_sequences=num_return_sequences,
        seed=seed, max_seq_len=max_seq_len, cache=cache, cache_budget_mb=budget_mb,
        spec_k=spec_k, compile=compile or None,
    )  # fmt: skip
    with o.one_line_errors():
        from caramba_fast.cli.models import Setup, run_generate  # noqa: PLC0415

        text = sys.stdin.read() if prompt == "-" else prompt
        run_generate(text, Setup(model, settings, draft, device, dtype, revision), stats, session)


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face checkpoint folder, a .gguf file, a Hub id, 'demo', or 'demo:dba'."
        ),
    ] = "demo",
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    revision: o.Revision = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key for clients; repeat for several.", envvar="CARAMBA_FAST_API_KEY"
        ),
    ] = None,
    allow_no_key: Annotated[
        bool, typer.Option("--allow-no-key", help="Allow remote clients without an API key.")
    ] = False,
    name: o.ServedName = None,
    cache: o.ServedCache = "q8",
    cache_memory: o.CacheMemory = None,
    max_seq_len: o.ServedRoom = 4096,
    max_batch_size: o.ServedBatch = 16,
    max_waiting: Annotated[
        int, typer.Option(help="Queue limit; further requests get status 429.", min=1)
    ] = 256,
    share_prefixes: Annotated[
        bool,
        typer.Option("--share-prefixes", help="Share cached prefixes between API keys."),
    ] = False,
    prefix_store: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps cached prefixes across restarts."),
    ] = None,
    prefix_store_size: Annotated[
        str,
        typer.Option(
            help="Size limit of --prefix-store; least recently used prefixes are deleted."
        ),
    ] = STORE_SIZE,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    settings = dict(
        cache=cache, max_seq_len=max_seq_len, max_batch_size=max_batch_size, max_waiting=max_waiting
    )  # fmt: skip
    with o.one_line_errors():
        from caramba_fast.cli import serve as server  # noqa: PLC0415

        address = server.Address(host, port, api_key or (), allow_no_key)
        server.check_address(address)
        if cache_memory is not None:
            settings["cache_bytes"] = server.memory(cache_memory)
        if prefix_store is not None:
            settings["prefix_store"] = prefix_store
            most = server.memory(prefix_store_size, "--prefix-store-size")
            settings["prefix_store_bytes"] = most
        elif prefix_store_size != STORE_SIZE:
            raise ValueError(
                f"--prefix-store-size is {prefix_store_size}, and there is no --prefix-store; give a folder"
            )
        engine = server.open_engine(model, device, dtype, settings, revision)
        server.run_server(engine, name or model, address, share_prefixes)


@app.command()
def chat(
    model: o.Model = "demo",
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    revision: o.Revision = None,
    compile: o.Compile = False,
    stats: o.Stats = False,
    system: Annotated[
        str, typer.Option(help="System prompt, for models with a chat template.")
    ] = "",
    cache: o.Cache = "q8",
    budget_mb: o.Budget = None,
    max_seq_len: o.Room = 4096,
    max_new_tokens: o.NewTokens = 256,
    stop: o.Stop = None,
    temperature: o.Temperature = 0.8,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Penalty = None,
    seed: o.Seed = None,
    draft: o.DraftModel = None,
    spec_k: o.DraftLength = None,
) -> None:
    """Chat in the terminal; the cache is kept between turns, so only new text is read.

    /reset starts over, /undo takes back the last turn, /stats shows
    figures, /session save FILE and /session load FILE save and load the
    chat, /quit or Ctrl-D ends it. Ctrl-C stops an answer and keeps its text.
    """
    settings = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, stop=tuple(stop) if stop else None, seed=seed,
        max_seq_len=max_seq_len, cache=cache, cache_budget_mb=budget_mb, spec_k=spec_k, compile=compile or None,
    )  # fmt: skip
    with o.one_line_errors():
        from caramba_fast.cli.chat import run_chat  # noqa: PLC0415
        from caramba_fast.cli.models import Setup  # noqa: PLC0415

        run_chat(Setup(model, settings, draft, device, dtype, revision), system, stats)


@app.command()
def run(
    manifest: Annotated[Path, typer.Argument(help="A YAML file, such as examples/manifest.yml.")],
    only: Annotated[
        str | None, typer.Option(help="Run only this target, run or TARGET/RUN.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Use this prompt instead of the manifest's.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the manifest, list its runs, and exit.")
    ] = False,
    force: o.Force = False,
) -> None:
    """Run a YAML manifest of generations, and of benchmarks that write metrics as JSON."""
    with o.one_line_errors():
        from caramba_fast.cli.manifest import run_file  # noqa: PLC0415

        run_file(manifest, only, prompt, check, force=force)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def calibrate(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:  # noqa: ARG001
    """Removed; prints why."""
    raise typer.BadParameter(
        "'calibrate' was removed, and --calibration with it: 'q8', 'q4' and 'nf4' store keys by channel, which needs "
        "no calibration"
    )


@app.command()
def quality(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face checkpoint folder, a .gguf file, a Hub id, demo:gqa, demo:dba, or a hard "
            "variant such as demo:gqa/outliers-8."
        ),
    ] = "demo:gqa",
    text: Annotated[
        str | None,
        typer.Option(help="Text file to measure on (needed except for demo models), or 'demo'."),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="Cache to measure, such as q4 or q8/q4; repeat for several."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="Cache to compare with.")] = "fp16",
    context: Annotated[
        list[int] | None,
        typer.Option(help="Context length in tokens; repeat for several. Default: 1024."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text per context length.")] = 16384,
    needles: Annotated[int, typer.Option(help="Needles per context length; 0 for none.")] = 1024,
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    revision: o.Revision = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the table, the plot, and partial results to resume from."),
    ] = None,
    force: o.Force = False,
) -> None:
    """Measure each cache's loss of quality, with confidence intervals."""
    with o.one_line_errors():
        from caramba_fast.cli.quality import run_quality  # noqa: PLC0415

        run_quality(
            model, text, cache or (), context or (), out, baseline=baseline, tokens=tokens,
            needles=needles, device=device, dtype=dtype, revision=revision, force=force,
        )  # fmt: skip


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face checkpoint folder, a .gguf file, a Hub id, demo, demo:dba, or a hard variant "
            "such as demo:gqa/outliers-8."
        ),
    ] = "demo",
    budget_mb: Annotated[float | None, typer.Option(help=o.BUDGET)] = None,
    max_delta_nll: Annotated[
        float | None, typer.Option(help="Largest mean increase in NLL, nats per token.")
    ] = None,
    max_ppl_ratio: Annotated[float | None, typer.Option(help="Largest perplexity ratio.")] = None,
    max_mean_kl: Annotated[
        float | None, typer.Option(help="Largest mean KL(fp16 ‖ candidate), nats.")
    ] = None,
    min_needle: Annotated[
        float | None, typer.Option(help="Smallest needle retrieval relative to fp16.")
    ] = None,
    max_seq_len: Annotated[int, typer.Option(help="Tokens per row of the cache.")] = 2048,
    batch: Annotated[int, typer.Option(help="Batch size: rows of the cache.")] = 1,
    prefill: Annotated[str, typer.Option(help="Prompt attention: exact or stored.")] = "exact",
    text: Annotated[
        str | None,
        typer.Option(
            help="Text file to measure on. Default: held-out text for demo models; others generate "
            "their own."
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Candidate cache, such as q8/q4; repeat for several.")
    ] = None,
    prompt_len: Annotated[
        int | None, typer.Option(help="Tokens prefilled per quality window. Default: 64.")
    ] = None,
    decode_steps: Annotated[
        int | None, typer.Option(help="Tokens then decoded through the cache. Default: 4.")
    ] = None,
    bench_prompt_len: Annotated[
        int | None, typer.Option(help="Cached tokens when steps are timed. Default: 64.")
    ] = None,
    bench_steps: Annotated[
        int | None, typer.Option(help="Decode steps per timed round. Default: 8.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="If nothing passes the gates, take the lowest KL.")
    ] = False,
    plan_path: Annotated[
        Path | None, typer.Option(help="JSON file to save the plan in and reuse it from.")
    ] = None,
    probe_sec: Annotated[
        float | None, typer.Option(help="Recheck a saved plan after this many seconds.")
    ] = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = "float32",
    revision: o.Revision = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot quality against bytes: a .png or .svg file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    force: o.Force = False,
) -> None:
    """Show which cache "auto" chooses here: all candidates, their figures, why they were rejected."""
    settings = dict(
        cache_budget_mb=budget_mb, cache_quality_max_delta_nll=max_delta_nll,
        cache_quality_max_ppl_ratio=max_ppl_ratio, cache_quality_max_mean_kl=max_mean_kl,
        cache_quality_min_needle=min_needle, cache_quality_prompt_len=prompt_len,
        cache_quality_decode_steps=decode_steps, cache_auto_bench_prompt_len=bench_prompt_len,
        cache_auto_bench_steps=bench_steps, cache_auto_candidates=tuple(candidate or ()) or None,
        cache_plan_path=plan_path, cache_plan_probe=None if probe_sec is None else True,
        cache_plan_probe_interval_sec=probe_sec, on_no_candidate="best" if best else None,
    )  # fmt: skip
    with o.one_line_errors():
        from caramba_fast.cli.plan import run_plan  # noqa: PLC0415

        run_plan(
            model, text, settings, max_seq_len=max_seq_len, batch=batch, prefill=prefill,
            device=device, dtype=dtype, revision=revision, plot=plot, as_json=as_json, force=force,
        )  # fmt: skip
