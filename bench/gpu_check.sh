#!/usr/bin/env bash
# Builds, checks, tunes and measures this package on a machine with a CUDA device and no network.
#
#   bench/gpu_check.sh [--force] [--dry-run] OUT_DIR [build|parity|sanitize|bench|model|tune ...]
#
# Stages run in the order given (default: all) and leave OUT_DIR/<stage>.log; parity also host_time.json, sanitize
# racecheck.log, bench bench.csv and bench.json, tune tune.csv, model a table of decode steps for each model. Kernels are
# compiled on all cores first. A part of a stage that fails does not stop the others, nor a stage the stages behind it,
# but for build. What there was no time for is "left out". A stage that succeeded is skipped until a source file changes
# or --force is given; tune and bench go on where they stopped. --dry-run runs every stage on the CPU with tiny shapes and
# interpreted kernels: it checks this script, nothing else.
#
# From the environment:
#   LIMIT_S   seconds of a stage at most (480)
#   GRIDS     what bench measures: core (35 cases, a few minutes), full (core first, then as many as there is time for)
#   MODELS    what model measures: llama-3.2-1b and llama-3.1-8b, at CONTEXTS cached tokens (4096 32768 131072)
#   WHEELS    a folder with wheels of what the machine lacks, which build installs ("make gpu-wheels" fills one);
#             without pydantic only the grid of parity, sanitize, bench and tune run
#   PYTHON    the interpreter (python3)
#   CARAMBA_FAST_BUILD_CPP   1: build also compiles the C++ kernels, which no stage needs (0)
#   CARAMBA_FAST_WORK        where marks and tables lie between calls (below TMPDIR)
#
# Exit status: 0 all well or no CUDA device, 1 a stage failed, 2 wrong arguments.

set -euo pipefail

readonly LIMIT_S="${LIMIT_S:-480}"
readonly GRIDS="${GRIDS:-core}" MODELS="${MODELS:-llama-3.2-1b llama-3.1-8b}" CONTEXTS="${CONTEXTS:-4096 32768 131072}"
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

# What is left of this stage's time, less a margin in seconds; 1 at least, for commands that take it as their limit.
left() {
    local seconds=$((LIMIT_S - SECONDS - $1))
    echo $((seconds > 1 ? seconds : 1))
}

# Runs a part of a stage: that it failed is kept for the end of the stage, that it had too little time is said.
part() {
    local name="$1" status=0
    shift
    "$@" || status=$?
    case "$status" in
        0) ;;
        3 | 124 | 137) echo "$name: left out: there was no time for all of it" ;;
        *)
            echo "$name: FAILED with status $status"
            FAILED=1
            ;;
    esac
}

# Compiles on all cores; what is not ready in time, or does not compile, shows when it is run.
ahead() {
    module shards "$@" || echo "not all kernels were compiled ahead: the others are when they are run"
}

has() {
    "$PYTHON" -c "import $1" 2>/dev/null
}

# What the package needs and the machine may lack, from the folder WHEELS.
wheels() {
    [[ -n "${WHEELS:-}" ]] || return 0
    if ! ls "$WHEELS"/*.whl >/dev/null 2>&1; then
        echo "build: WHEELS is '$WHEELS', where no wheels are; a folder of wheels of pydantic and what it needs is allowed"
        return 1
    fi
    local install=("$PYTHON" -m pip install --no-index --find-links "$WHEELS")
    "${install[@]}" pydantic
    if ls "$WHEELS"/setuptools-*.whl >/dev/null 2>&1; then
        "${install[@]}" --upgrade setuptools
    fi
    if ! "${install[@]}" pytest hypothesis; then
        echo "build: the wheels have no pytest and hypothesis: parity does without the tests under tests/"
    fi
}

# Whether setuptools can read pyproject.toml; says so where it cannot.
setuptools() {
    local needed found
    needed="$(sed -n 's/^requires = .*"setuptools>=\([0-9]*\).*/\1/p' "$ROOT/pyproject.toml")"
    found="$("$PYTHON" -c "import setuptools; print(setuptools.__version__)")" || found="none"
    if [[ "$found" == none ]] || ((${found%%.*} < needed)); then
        echo "build: setuptools is $found and pyproject.toml needs $needed or later: put a wheel of it into the folder WHEELS"
        return 1
    fi
}

build() {
    wheels
    if [[ "$DRY" == 0 ]]; then
        setuptools
        cd "$ROOT"
        export CARAMBA_FAST_BUILD_CPP="${CARAMBA_FAST_BUILD_CPP:-0}" # nothing on a GPU runs them
        if ! MAX_JOBS="$(nproc)" "$PYTHON" -m pip install --no-build-isolation --no-deps -e .; then
            echo "build: pip could not install the package from $ROOT; the reason is above"
            return 1
        fi
        has pydantic || echo "build: there is no pydantic (WHEELS): parity runs its grid alone, and no model is run"
    fi
    cd /
    "$PYTHON" -c "import caramba_fast; print(*caramba_fast.backends(), sep='\n')"
}

# The tests that compare devices, but for most of the options of attention: the grid has them.
tests_on_device() {
    local status=0 workers=()
    ! has xdist || workers=(-n 8)
    timeout -k 10 "$1" "$PYTHON" -m pytest -q -p no:cacheprovider "${workers[@]}" --device cuda \
        -k "quantize or merge or rotary or balanced or plain or decoupled or replays" \
        tests/ops/test_device_parity.py tests/ops/test_triton_quantize.py \
        "tests/serve/test_graphs.py::test_replays_give_the_tokens_of_steps_on_this_device" || status=$?
    [[ "$status" != 3 ]] || status=1 # of pytest 3 is an error of its own
    return "$status"
}

parity() {
    cd "$ROOT"
    if [[ "$DRY" == 1 ]]; then
        module check --quick --backends triton --require triton
        "$PYTHON" -m caramba_fast.bench.serving.graphs --device cpu --kinds q4
        return
    fi
    # A process that reaches its own limit says how far it came; one that hangs says in what, and is ended.
    local grid=$((LIMIT_S * 3 / 5))
    part "parity: grid" module shards $((grid + 60)) --shard check --device cuda --backends triton --require triton \
        --time-limit "$grid"
    if ! has pydantic; then
        echo "parity: no pydantic: repeated steps, graphs and the tests under tests/ were not run"
        return
    fi
    part "parity: graphs" module shards "$(left 60)" --shard serving.graphs --device cuda
    part "parity: repeated steps" module shards "$(left 50)" --shard host_time
    part "parity: host time" timeout -k 10 "$(left 40)" "$PYTHON" -m caramba_fast.bench.kernels.host_time \
        --out "$OUT_DIR/host_time.json"
    if has pytest && (($(left 0) > 40)); then
        part "parity: tests" tests_on_device "$(left 10)"
    else
        echo "parity: tests: left out: no pytest, or no time"
    fi
}

# One tool of compute-sanitizer; what racecheck finds is in a file of its own, and is to be read, not believed.
sanitized() {
    local check="$1" status=0
    shift
    if [[ "$check" != racecheck ]]; then
        timeout -k 10 "$(left 10)" "$@"
        return
    fi
    timeout -k 10 "$(left 10)" "$@" >"$OUT_DIR/racecheck.log" 2>&1 || status=$?
    if [[ "$status" == 9 ]]; then
        echo "racecheck found $(grep -c "Race reported" "$OUT_DIR/racecheck.log") races: they are in racecheck.log and do not" \
            "fail this stage. In Triton's reductions it is known to report some that are none (triton-lang/triton#7264)."
        return 0
    fi
    return "$status"
}

sanitize() {
    cd "$ROOT"
    local small=("$PYTHON" -m caramba_fast.bench.kernels.check --small --backends triton)
    if [[ "$DRY" == 1 ]]; then
        "${small[@]}" --shard 1/3 # bench verifies all of them
        return
    fi
    small+=(--device cuda)
    part "sanitize: results" "${small[@]}" # compiles
    local tool
    tool="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)" || true
    if [[ -z "$tool" ]]; then
        echo "sanitize: compute-sanitizer is not installed; nothing was sanitized"
        return 0
    fi
    if ! timeout -k 10 120 "$tool" --error-exitcode 9 "$PYTHON" -c "import torch; torch.zeros(1, device='cuda').cpu()"; then
        echo "sanitize: $tool does not work on this machine (a tensor of one zero); nothing was sanitized"
        return 0
    fi
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor its own allocation: reading past it shows
    local check
    for check in memcheck initcheck synccheck racecheck; do
        (($(left 0) > 60)) || { echo "sanitize: $check: left out: no time"; continue; }
        echo "sanitize: $check"
        part "sanitize: $check" sanitized "$check" "$tool" --tool "$check" --error-exitcode 9 "${small[@]}"
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
    ahead "$((LIMIT_S / 2))" --compile-only tune
    part "tune" module tune "${table[@]}" --time-limit "$(left 30)"
}

bench() {
    cd "$ROOT"
    local table=(--out "$WORK/bench.csv" --resume)
    if [[ "$DRY" == 1 ]]; then
        module run --grid tiny --backend triton "${table[@]}"
        return
    fi
    local grid
    for grid in $GRIDS; do
        (($(left 0) > 60)) || { echo "bench: no time for grid $grid: cases left out"; continue; }
        ahead "$(($(left 60) / 2))" --compile-only run --device cuda --grid "$grid"
        part "bench: grid $grid" module run --device cuda --grid "$grid" "${table[@]}" --time-limit "$(left 45)"
    done
}

model() {
    cd "$ROOT"
    if ! has "transformers, pydantic"; then
        echo "model: transformers or pydantic is not installed; no model was run"
        return 0
    fi
    local decode=("$PYTHON" -m caramba_fast.bench.real.decode --out "$OUT_DIR")
    if [[ "$DRY" == 1 ]]; then
        "${decode[@]}" tiny --contexts 64 --quick
        return
    fi
    local shape
    for shape in $MODELS; do
        (($(left 0) > 60)) || { echo "model: no time for $shape: left out"; continue; }
        # shellcheck disable=SC2086 # CONTEXTS are several numbers
        ahead "$(($(left 10) / 2))" --compile-only real.decode "$shape" --device cuda --quick --contexts $CONTEXTS
        part "model: $shape" timeout -k 10 "$(left 10)" "${decode[@]}" "$shape" --device cuda --quick --contexts $CONTEXTS
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
        timeout -k 20 "$LIMIT_S" bash -euo pipefail -c "SECONDS=0 FAILED=0; $stage; exit \$FAILED" 2>&1 \
            | tee "$OUT_DIR/$stage.log" || status=$?
        if [[ "$status" == 124 || "$status" == 137 ]]; then
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
[[ "$LIMIT_S" =~ ^[1-9][0-9]*$ ]] || { echo "gpu_check: LIMIT_S is '$LIMIT_S'; seconds are needed" >&2; usage; }
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
export ROOT PYTHON OUT_DIR WORK DRY LIMIT_S GRIDS MODELS CONTEXTS PYTHONUNBUFFERED=1
export -f module left part ahead has wheels setuptools build tests_on_device parity sanitized sanitize bench model tune
result=0
for stage in "${chosen[@]}"; do
    run_stage "$stage" || result=1
    [[ "$result" == 0 || "$stage" != build ]] || break # nothing else would run
done
exit "$result"
