"""Measures one shape: checks every system's answer against float64, then times steps of all in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from caramba_fast.bench.kernels.timing import (
    PROBE,
    SHORTEST_SAMPLE_S,
    SLOW_S,
    Sampler,
    cpu_sampler,
    in_turn,
    probe,
    quantile,
    ratio,
    threads,
)
from caramba_fast.bench.peers import trial
from caramba_fast.bench.peers.groups import groups
from caramba_fast.bench.peers.problem import Problem, Shape
from caramba_fast.bench.peers.session import Session, System
from caramba_fast.bench.peers.systems import BASELINES, OURS

Row = dict[str, Any]
CPU = torch.device("cpu")


def opened(system: System, problem: Problem) -> Session | str:
    """A system's session after one step, or why there is none."""
    reason = system.reason(problem.shape)
    if not reason and system.trial:
        reason = trial.outcome(system, problem.shape)
    if reason:
        return reason
    try:
        session = system.build(problem)
        session.step()
    except Exception as error:
        # Other programs may raise anything; the row reports it. Ours must work.
        if system.ours:
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        return f"does not run here: {said[-160:]}"
    return session


def sampler(session: Session, fits: int) -> Sampler:
    """Times steps of a session that has taken one; a growing one is rewound after ``fits`` steps.

    A fast one takes a step before the clock starts, since other sessions have evicted it from the processor's caches.
    """
    taken = 1

    def seconds(count: int, before: int = 0) -> float:
        nonlocal taken
        if session.grows and taken + before + count > fits:
            session.rewind()
            taken = 0
        taken += before + count
        for _ in range(before):
            session.step()
        started = time.perf_counter()
        for _ in range(count):
            session.step()
        found = time.perf_counter() - started
        session.rest()
        return found / count

    once = seconds(1)
    before = int(once < SLOW_S)
    if before:  # the first call of a fast one is slower than the others
        once = seconds(1)
    repeats = max(1, math.ceil(SHORTEST_SAMPLE_S / once))
    repeats = min(repeats, fits - before) if session.grows else repeats
    return Sampler(lambda: seconds(repeats, before), once * (repeats + before))


def measure(
    shape: Shape, listed: Sequence[System], rounds: int, say: Callable[[str], None] = print
) -> list[Row]:
    """The rows of a shape, in the order of ``listed``; a row without figures has a note."""
    found: dict[System, Row] = {}
    with threads(shape.threads), torch.no_grad():
        problem = Problem(shape)
        together, left = groups(shape, listed)
        for group in together:
            for system, row in _measured(problem, group, rounds, say).items():
                found.setdefault(system, row)
    found |= {system: {"note": why} for system, why in left.items()}
    about = {**vars(shape)}
    return [{**about, "system": s.name, "kind": s.kind, "bits": s.bits, **found[s]} for s in listed]


def _measured(
    problem: Problem, group: Sequence[System], rounds: int, say: Callable[[str], None]
) -> dict[System, Row]:
    rows: dict[System, Row] = {}
    samplers: dict[System | str, Sampler] = {}
    sessions: dict[System, Session] = {}
    for system in group:
        session = opened(system, problem)
        if isinstance(session, str):
            say(f"  {system.title}: {session}")
            rows[system] = {"note": session}
            continue
        sessions[system] = session
        rows[system], right = _checked(system, session)
        if right:
            fits = 1 + problem.shape.slack // problem.shape.tokens
            samplers[system] = sampler(session, fits)
    samplers[PROBE] = cpu_sampler(probe("decode_attention", CPU))
    samples = in_turn(samplers, rounds)
    _add_figures(rows, samples)
    for session in sessions.values():
        session.close()
    return rows


def _checked(system: System, session: Session) -> tuple[Row, bool]:
    """(error, bytes and note; whether the precision explains the error)."""
    error = session.problem.error(session.output())
    row: Row = {
        "error": float(f"{error:.2g}"),
        "stored_bytes": session.stored,
        "note": session.note,
    }
    right = error <= system.allowed  # NaN is wrong
    if not right:
        row["note"] = f"wrong: error {error:.2g} > {system.allowed:g}"
    return row, right


def _add_figures(rows: dict[System, Row], samples: dict[System | str, dict[int, float]]) -> None:
    speed = probe("decode_attention", CPU).moved / quantile(list(samples[PROBE].values()), 0.5)
    for system, row in rows.items():
        taken = samples.get(system)
        if taken is None:
            continue
        for name, share in (("median", 0.5), ("p20", 0.2), ("p80", 0.8)):
            row[f"{name}_us"] = round(quantile(list(taken.values()), share) * 1e6, 2)
        read = row["stored_bytes"] / row["median_us"] * 1e6
        row |= {"samples": len(taken), "gb_per_s": round(read * 1e-9, 2)}
        row |= {"probe_gb_per_s": round(speed * 1e-9, 2), "share": round(read / speed, 3)}
        base = next(
            (s for s in samples if isinstance(s, System) and s.name == OURS and s.kind == BASELINES[system.bits]),
            None,
        )  # fmt: skip
        if base is not None:
            row |= {
                "vs_ours": round(ratio(taken, samples[base]), 3),
                "ours": BASELINES[system.bits],
            }
