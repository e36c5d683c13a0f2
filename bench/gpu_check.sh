#!/usr/bin/env bash
# Builds, checks, tunes and measures this package on a machine with a CUDA device and no network.
#
#   bench/gpu_check.sh [--force] [--dry-run] OUT_DIR [build|parity|sanitize|bench|model|tune ...]
#
# Stages run in the order given (default: all), each for 8 minutes at most, and leave OUT_DIR/<stage>.log; tune
# also tune.csv, bench also bench.csv and bench.json, model a table of decode steps of whole models. Kernels are compiled on all cores first. A stage that succeeded is
# skipped until a source file changes or --force is given; tune and bench go on where they stopped. Marks and tables lie in
# CARAMBA_FAST_WORK (default: below TMPDIR). PYTHON chooses the interpreter; build installs what is missing from the
# wheels in the folder WHEELS, if one is given ("make gpu-wheels" fills it). --dry-run runs every stage on
# the CPU with tiny shapes and interpreted kernels: it checks this script, nothing else.
# Exit status: 0 all well or no CUDA device, 1 a stage failed, 2 wrong arguments.

set -euo pipefail

readonly LIMIT_S=480
readonly STAGES="build parity sanitize bench model tune"
readonly ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly PYTHON="${PYTHON:-python3}"

usage() {
    echo "usage: gpu_check.sh [--force] [--dry-run] OUT_DIR [stage...]; stages are: $STAGES" >&2
    exit 2
}

module() {
    local name="$1"
    shift
    "$PYTHON" -m "caramba_fast.bench.kernels.$name" "$@"
}

# What is left of this stage's time, less a margin in seconds.
left() {
    echo $((LIMIT_S - SECONDS - $1))
}

# Compiles on all cores; what is not ready in time (status 3) is compiled when it is run.
ahead() {
    local status=0
    module shards "$@" || status=$?
    [[ "$status" == 0 || "$status" == 3 ]]
}

# What the package needs and the machine may lack, from the folder WHEELS.
wheels() {
    [[ -n "${WHEELS:-}" ]] || return 0
    if ! ls "$WHEELS"/*.whl >/dev/null 2>&1; then
        echo "build: WHEELS is '$WHEELS', where no wheels are; a folder of wheels of pydantic and what it needs is allowed"
        return 1
    fi
    "$PYTHON" -m pip install --no-index --find-links "$WHEELS" pydantic
    if ! "$PYTHON" -m pip install --no-index --find-links "$WHEELS" pytest hypothesis; then
        echo "build: the wheels have no pytest and hypothesis: parity does without the tests under tests/"
    fi
}

build() {
    wheels
    if [[ "$DRY" == 0 ]]; then
        cd "$ROOT"
        if ! MAX_JOBS="$(nproc)" "$PYTHON" -m pip install --no-build-isolation --no-deps -e .; then
            echo "build: pip could not install the package from $ROOT; the reason is above"
            return 1
        fi
    fi
    cd /
    "$PYTHON" -c "import caramba_fast; print(*caramba_fast.backends(), sep='\n')"
}

parity() {
    cd "$ROOT"
    if [[ "$DRY" == 1 ]]; then
        module check --quick --backends triton --require triton
        "$PYTHON" -m caramba_fast.bench.serving.graphs --device cpu --kinds q4
        return
    fi
    module shards "$(left 60)" --shard check --device cuda --require triton
    if "$PYTHON" -c "import pydantic" 2>/dev/null; then
        module host_time --out "$OUT_DIR/host_time.json" # fails where a repeated step does something else
        "$PYTHON" -m caramba_fast.bench.serving.graphs --time-limit 120
    fi
    if "$PYTHON" -c "import pytest, pydantic" 2>/dev/null && (($(left 0) > 60)); then
        timeout "$(left 10)" "$PYTHON" -m pytest -q -p no:cacheprovider --device cuda \
            tests/ops/test_device_parity.py tests/ops/test_triton_quantize.py \
            "tests/serve/test_graphs.py::test_replays_give_the_tokens_of_steps_on_this_device"
    else
        echo "parity: no pytest, no pydantic or no time left; the tests under tests/ were not run"
    fi
}

sanitize() {
    cd "$ROOT"
    local small=("$PYTHON" -m caramba_fast.bench.kernels.check --small --backends triton)
    if [[ "$DRY" == 1 ]]; then
        "${small[@]}"
        return
    fi
    small+=(--device cuda)
    "${small[@]}" # compiles, and fails by itself if results are wrong
    local tool
    tool="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)" || true
    if [[ -z "$tool" ]]; then
        echo "sanitize: compute-sanitizer is not installed; nothing was sanitized"
        return 0
    fi
    if ! "$tool" --error-exitcode 9 "$PYTHON" -c "import torch; torch.zeros(1, device='cuda').cpu()"; then
        echo "sanitize: $tool does not work on this machine (a tensor of one zero); nothing was sanitized"
        return 0
    fi
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor its own allocation: reading past it shows
    local check
    for check in memcheck racecheck synccheck; do
        (($(left 0) > 60)) || { echo "sanitize: no time for $check"; continue; }
        echo "sanitize: $check"
        timeout "$(left 10)" "$tool" --tool "$check" --error-exitcode 9 "${small[@]}"
    done
}

tune() {
    cd "$ROOT"
    local table=(--out "$WORK/tune.csv")
    if [[ "$DRY" == 1 ]]; then
        module tune --device cpu --tiny "${table[@]}"
        return
    fi
    # What did not compile in time is compiled, one by one, when it is measured.
    ahead "$(left 180)" --compile-only tune
    module tune "${table[@]}" --time-limit "$(left 30)"
}

bench() {
    cd "$ROOT"
    local table=(--out "$WORK/bench.csv" --resume)
    if [[ "$DRY" == 1 ]]; then
        module run --grid tiny --backend triton "${table[@]}"
        return
    fi
    local grid
    for grid in core full; do
        (($(left 0) > 60)) || { echo "bench: no time for grid $grid: cases left out"; continue; }
        ahead "$(($(left 60) / 2))" --compile-only run --device cuda --grid "$grid"
        module run --device cuda --grid "$grid" "${table[@]}" --time-limit "$(left 45)"
    done
}

model() {
    cd "$ROOT"
    if ! "$PYTHON" -c "import transformers"; then
        echo "model: transformers is not installed; no model was run"
        return 0
    fi
    local decode=("$PYTHON" -m caramba_fast.bench.real.decode --out "$OUT_DIR")
    if [[ "$DRY" == 1 ]]; then
        "${decode[@]}" tiny --contexts 64 --quick
        return
    fi
    local shape
    for shape in llama-3.2-1b llama-3.1-8b; do
        (($(left 0) > 90)) || { echo "model: no time for $shape: left out"; continue; }
        timeout "$(left 20)" "${decode[@]}" "$shape" --device cuda --quick --contexts 4096 32768 131072
    done
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
    else
        rm -f "$WORK/$stage.done"
        [[ "$FORCE" == 0 ]] || rm -f "$WORK/$stage.csv"
        timeout "$LIMIT_S" bash -euo pipefail -c "SECONDS=0; $stage" 2>&1 | tee "$OUT_DIR/$stage.log" || status=$?
        if [[ "$status" == 124 ]]; then
            echo "$stage: stopped after $LIMIT_S s"
        elif [[ "$status" != 0 ]]; then
            echo "$stage: failed with status $status"
        elif grep -q "left out" "$OUT_DIR/$stage.log"; then
            echo "$stage: not finished in its time; call again to go on"
        else
            touch "$WORK/$stage.done"
            echo "$stage: done"
        fi
    fi
    local table
    for table in "$WORK/$stage".{csv,json}; do
        [[ ! -e "$table" ]] || cp "$table" "$OUT_DIR"
    done
    return "$status"
}

FORCE=0 DRY=0
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --force) FORCE=1 ;;
        --dry-run) DRY=1 ;;
        *) usage ;;
    esac
    shift
done
[[ $# -ge 1 ]] || usage
OUT_DIR="$1"
shift
# shellcheck disable=SC2206 # the stages' names hold no spaces
chosen=(${@:-$STAGES})
for stage in "${chosen[@]}"; do
    [[ " $STAGES " == *" $stage "* ]] || { echo "gpu_check: unknown stage '$stage'" >&2; usage; }
done

WORK="${CARAMBA_FAST_WORK:-${TMPDIR:-/tmp}/caramba-fast-gpu-check}"
unset TRITON_INTERPRET CARAMBA_FAST_BACKEND # whatever the caller's environment says
if [[ "$DRY" == 1 ]]; then
    WORK+="-dry-run"
    export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES="" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
elif ! devices="$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")"; then
    echo "gpu_check: $PYTHON cannot import torch" >&2
    exit 1
elif [[ "$devices" == 0 ]]; then
    echo "no CUDA device: nothing to check (stages asked for: ${chosen[*]})"
    exit 0
fi

mkdir -p "$OUT_DIR" "$WORK"
OUT_DIR="$(cd "$OUT_DIR" && pwd)"
export ROOT PYTHON OUT_DIR WORK DRY LIMIT_S
export -f module left ahead wheels build parity sanitize bench model tune
for stage in "${chosen[@]}"; do
    run_stage "$stage" || exit 1
done
