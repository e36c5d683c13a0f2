#!/usr/bin/env bash
# Builds, checks and measures this package on a machine with a CUDA device and no network.
#
#   bench/gpu_check.sh [--force] OUT_DIR [build|parity|bench ...]
#
# Stages run in the order given (default: all three), each for 8 minutes at most, and leave
# OUT_DIR/<stage>.log; bench also leaves OUT_DIR/bench.csv. A stage that succeeded is skipped until
# a source file changes or --force is given; its mark lies in CARAMBA_FAST_WORK (default: below
# TMPDIR). PYTHON chooses the interpreter. Exit status: 0 all well or no CUDA device, 1 a stage
# failed, 2 wrong arguments.

set -euo pipefail

readonly LIMIT_S=480
readonly STAGES="build parity bench"
readonly ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly PYTHON="${PYTHON:-python3}"
readonly WORK="${CARAMBA_FAST_WORK:-${TMPDIR:-/tmp}/caramba-fast-gpu-check}"

usage() {
    echo "usage: gpu_check.sh [--force] OUT_DIR [stage...]; stages are: $STAGES" >&2
    exit 2
}

build() {
    cd "$ROOT"
    if ! "$PYTHON" -m pip install --no-build-isolation --no-deps -e .; then
        echo "build: pip could not install the package from $ROOT; the reason is above"
        return 1
    fi
    cd /
    "$PYTHON" -c "import caramba_fast; print(*caramba_fast.backends(), sep='\n')"
}

# Kernels have to be compiled here, whatever the caller's environment says.
parity() {
    cd "$ROOT"
    if "$PYTHON" -c "import pytest" 2>/dev/null; then
        "$PYTHON" -m pytest -q -p no:cacheprovider --device cuda tests/test_triton_*.py
    else
        echo "parity: pytest is not installed; running caramba_fast.bench.parity instead"
        "$PYTHON" -m caramba_fast.bench.parity --device cuda --require triton
    fi
}

bench() {
    cd "$ROOT"
    "$PYTHON" -m caramba_fast.bench.run --device cuda --out "$OUT_DIR/bench.csv"
}

# Whether a stage succeeded after the last change of a source file.
finished() {
    local mark="$WORK/$1.done"
    [[ -e "$mark" ]] || return 1
    local changed
    changed="$(cd "$ROOT" && find caramba_fast csrc kernels bench tests setup.py pyproject.toml \
        -type f ! -path '*/__pycache__/*' ! -name '*.so' ! -path 'bench/results/*' \
        -newer "$mark" -print -quit)"
    [[ -z "$changed" ]]
}

run_stage() {
    local stage="$1" status=0
    if [[ "$FORCE" == 0 ]] && finished "$stage"; then
        echo "$stage: done before, skipped (--force repeats it)"
        return 0
    fi
    rm -f "$WORK/$stage.done"
    timeout "$LIMIT_S" bash -euo pipefail -c "$stage" 2>&1 | tee "$OUT_DIR/$stage.log" || status=$?
    if [[ "$status" == 124 ]]; then
        echo "$stage: stopped after $LIMIT_S s"
    elif [[ "$status" != 0 ]]; then
        echo "$stage: failed with status $status"
    else
        touch "$WORK/$stage.done"
        echo "$stage: done"
    fi
    return "$status"
}

FORCE=0
if [[ "${1:-}" == "--force" ]]; then
    FORCE=1
    shift
fi
[[ $# -ge 1 && "$1" != -* ]] || usage
OUT_DIR="$1"
shift
# shellcheck disable=SC2206 # the stages' names hold no spaces
chosen=(${@:-$STAGES})
for stage in "${chosen[@]}"; do
    [[ " $STAGES " == *" $stage "* ]] || { echo "gpu_check: unknown stage '$stage'" >&2; usage; }
done

if ! devices="$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")"; then
    echo "gpu_check: $PYTHON cannot import torch" >&2
    exit 1
fi
if [[ "$devices" == 0 ]]; then
    echo "no CUDA device: nothing to check (stages asked for: ${chosen[*]})"
    exit 0
fi

mkdir -p "$OUT_DIR" "$WORK"
OUT_DIR="$(cd "$OUT_DIR" && pwd)"
unset TRITON_INTERPRET
export ROOT PYTHON OUT_DIR
export -f build parity bench
for stage in "${chosen[@]}"; do
    run_stage "$stage" || exit 1
done
