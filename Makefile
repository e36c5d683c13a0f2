# Every target does all of its own set-up in .venv, with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEVICE ?= cpu
GRID   ?= quick
PIP    := $(BIN)/python -m pip install -q -c constraints.txt
# Python compiles what it imports, once, even where the environment forbids it to keep that: the tests start many processes,
# and each would compile torch anew. pip would compile all of torch and transformers, a minute in each environment.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
OLDEST := build/triton-oldest
HF_VERSIONS := 4.57 5.0
AOT    := bench/results/aot.csv
SANE   := build/sanitize/caramba_fast/_C.abi3.so
BUILD  := pyproject.toml setup.py $(wildcard csrc/*)

.PHONY: help demo test test-quick test-device sanitize cross lint format bench bench-quick bench-hf bench-decode bench-generation bench-serve bench-http bench-rows bench-page bench-predictions aot train train-biased clean

help:
	@echo "make demo         a trained model writes from fp16, q8, q4 and nf4 caches"
	@echo "make test         all tests, in two processes (WORKERS=0: in one)"
	@echo "make test-quick   most tests, in three minutes: for the loop of changing and trying"
	@echo "make test-device  the parity tests on DEVICE=cpu|cuda|mps"
	@echo "make test-upstream  transformers' own tests over accelerated models (UPSTREAM=--quick: minutes)"
	@echo "make readme       every block of README.md, as a reader would run it"
	@echo "make test-lowest  a short set of tests beside the oldest versions of what the package needs"
	@echo "make sanitize     the C++ tests under gcc's address and undefined-behaviour checks"
	@echo "make cross        compile the C++ with clang, for aarch64 and beside the oldest torch too, every warning an error"
	@echo "make test-aarch64 the C++ tests on 64-bit ARM, emulated (root, Debian's qemu-user-static; an hour)"
	@echo "make lint         formatting, lint, types, layers"
	@echo "make wheel        an sdist, wheels of the package and of the demo models, in dist/"
	@echo "make docs         the documentation site, in build/site"
	@echo "make bench        time the ops beside what torch has, ten minutes at most (DEVICE=cpu|cuda)"
	@echo "make bench-quick  the same in about a minute"
	@echo "make bench-decode decode steps of a whole model by cache kind, five minutes at most (CPU)"
	@echo "make bench-generation  tokens with and without a cache, overhead, speculation (CPU, half an hour)"
	@echo "make bench-serve  a fixed load: the engine beside static batches and transformers (CPU, eight minutes)"
	@echo "make bench-http   what HTTP costs an engine: SmolLM2 served to 16 clients (CPU, half an hour)"
	@echo "make bench-hf     decode steps under transformers beside its own caches (CPU, half an hour)"
	@echo "make bench-peers  OpenVINO, ONNX Runtime, ggml and torch beside our caches (CPU, PEERS=--quick: minutes; an hour)"
	@echo "make real         what caches cost real models, fetched first (REAL=--quick: a small part; hours without)"
	@echo "make bench-real   real models beside llama.cpp and OpenVINO GenAI (CPU, two hours)"
	@echo "make bench-rows   the same cases through pytest-benchmark (GRID=quick|cpu|core)"
	@echo "make gpu-wheels   what bench/gpu_check.sh installs on a machine with a GPU and no network"
	@echo "make aot          compile the Triton kernels ahead of time and record what they cost"
	@echo "make emulate      run the compiled kernels on the emulator and record that they are right"
	@echo "make train        train both demo models again (close to three hours)"
	@echo "make train-biased give the GQA demo model large key biases again (minutes)"

# torch comes first: the C++ extension is built against it, without build isolation.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy 'setuptools>=77' wheel ninja
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[cli,hf,plot]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

# The site and lint need no C++; what is built stays.
$(VENV)/.docs: $(VENV)/.torch $(BUILD)
	CARAMBA_FAST_BUILD_CPP=0 $(PIP) --no-build-isolation -e '.[docs,hf,cli]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	CARAMBA_FAST_BUILD_CPP=0 $(PIP) -e '.[lint]' --no-build-isolation
	@touch $@

# All that .ci/run needs, in one installation.
$(VENV)/.ci: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[test,lint,docs]'
	@touch $(VENV)/.test $(VENV)/.lint $(VENV)/.docs $@

# The oldest Triton, for compiling only: PYTHONPATH puts it in front of the one in .venv.
$(OLDEST)/.done: constraints-oldest.txt $(VENV)/.torch
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install -q -c constraints-oldest.txt --no-deps --target $(OLDEST) triton
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/caramba-fast demo --plot runs/demo.png

# Two workers of one thread each: most tests are Python beside small tensors. A file stays with one worker, so that what
# it builds once is built once; tests/conftest.py has the order. With a GPU the tests share one process.
WORKERS ?= $(if $(filter cpu,$(DEVICE)),2,0)
test test-quick: export OMP_NUM_THREADS = 1
test: $(VENV)/.test $(OLDEST)/.done
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --device=$(DEVICE)

# Without what takes most of the time: compilers, other processes, trained models, long runs of interrupts.
SLOW := tests/bench tests/distributed tests/quality tests/hf/test_compile.py tests/hf/test_static_cache.py \
	tests/hf/test_tensor_parallel.py tests/hf/test_upstream.py tests/infer/test_interrupts.py tests/infer/test_speculative.py tests/infer/test_speculative_sampling.py \
	tests/models/test_demo_model.py tests/ops/test_extension.py tests/ops/test_strided.py tests/serve/test_interrupts.py \
	tests/serve/test_schedules.py tests/test_hostile_files.py tests/cli/test_quality.py tests/policy/test_plan_file.py \
	tests/ops/test_fake_steps.py $(wildcard tests/ops/test_cpp_*.py tests/ops/test_triton_*.py)
test-quick: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(SLOW:%=--ignore=%)

test-device: $(VENV)/.test
	$(BIN)/python -m pytest --device=$(DEVICE) -m device

# What the tests need beside .venv: other versions, and the extension with gcc's checks.
.PHONY: ready
ready: $(OLDEST)/.done $(HF_VERSIONS:%=build/hf-%/.done) $(SANE)

# The C++ extension with gcc's checks, beside the ordinary one.
$(SANE): $(VENV)/.test $(BUILD)
	rm -rf build/sanitize
	CARAMBA_FAST_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/temp

# A process that loads the extension has to load the checks before everything else. They report to stderr and end the
# process, so pytest must not hold stderr back. Left out: what is slow for torch's part, and what runs no C++. With TURN, a
# hexadecimal digit, only one of this CPU's instruction sets is checked, each in its turn.
TURN ?=
sanitize: export CARAMBA_FAST_EXTENSION = $(CURDIR)/$(SANE)
sanitize: export ASAN_OPTIONS = detect_leaks=0:halt_on_error=1:malloc_context_size=6
sanitize: export UBSAN_OPTIONS = halt_on_error=1:print_stacktrace=1
sanitize: export OMP_NUM_THREADS = 1
sanitize: $(SANE)
	checks="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" && \
	sets=$$(LD_PRELOAD="$$checks" PYTHONPATH=tests $(BIN)/python -c \
		'from support.isas import expected_isas as sets; turn = "$(TURN)"; \
		print(*[sets()[int(turn, 16) % len(sets())]] if turn else sets())') && \
	printf '%s\n' $$sets | xargs -P 2 -I SET nice env CARAMBA_FAST_CPU_ISA=SET LD_PRELOAD="$$checks" \
		$(BIN)/python -m pytest -q --capture=sys -p no:cacheprovider \
		-k 'not (hundred_thousand or far_apart or opcheck or triton or gigabytes or on_amd or compiles_whole or unknown)' \
		tests/ops/test_extension.py tests/ops/test_cpp_attention.py tests/ops/test_cpp_bounds.py tests/ops/test_append.py \
		tests/ops/test_by_channel.py tests/ops/test_causal_attention.py tests/ops/test_rotary.py tests/ops/test_rotary_append.py

# The headers of the oldest torch, from its wheel for aarch64, which has no CUDA.
OLDEST_TORCH := build/cross/torch-oldest
$(OLDEST_TORCH)/.done: constraints-oldest.txt $(VENV)/.torch
	rm -rf $(OLDEST_TORCH)
	$(BIN)/python -m pip download -q -c constraints-oldest.txt --no-deps -d $(OLDEST_TORCH) --only-binary=:all: \
		--platform manylinux_2_28_aarch64 --python-version 3.11 torch
	cd $(OLDEST_TORCH) && $(CURDIR)/$(BIN)/python -c "import glob, zipfile; \
		z = zipfile.ZipFile(*glob.glob('*.whl')); z.extractall(members=[n for n in z.namelist() if n.startswith('torch/include/')])"
	rm $(OLDEST_TORCH)/*.whl
	@touch $@

# The C++ with clang, which the ziglang package brings: for x86-64 beside the torch of constraints.txt, for aarch64 beside
# the oldest torch.
cross: export ZIG_GLOBAL_CACHE_DIR = $(CURDIR)/build/cross
cross: $(VENV)/.lint $(OLDEST_TORCH)/.done
	newest=$$($(BIN)/python -c 'import torch; print(torch.__path__[0])') && for file in csrc/*.cpp; do \
		echo x86_64-linux-gnu $$file $$newest/include; \
		echo aarch64-linux-gnu $$file $(OLDEST_TORCH)/torch/include; done | \
		xargs -P 2 -L 1 sh -c '$(BIN)/python -m ziglang c++ -target $$0 -c $$1 -o build/cross/$$0-$$(basename $$1).o -std=c++17 -O0 \
		-ffp-contract=off -Wall -Wextra -Werror -DTORCH_TARGET_VERSION=0x020a000000000000 -isystem $$2 || exit 255'

# The tests of the C++ on 64-bit ARM, emulated; see the script.
.PHONY: test-aarch64
test-aarch64: $(VENV)/.test
	.ci/aarch64

# import-linter reads an ordinary install: an editable one hides the layers behind a finder.
lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror csrc/*
	$(BIN)/mypy
	rm -rf build/lint
	CARAMBA_FAST_BUILD_CPP=0 $(PIP) --no-deps --no-build-isolation --target build/lint .
	cd build/lint && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*

bench: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.kernels.run --device $(DEVICE) --time-limit 480 --out runs/bench-$(DEVICE).csv

bench-quick: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.kernels.run --device $(DEVICE) --quick

# The largest settings are started last; none after the limit.
bench-decode: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.generation.decode_model --time-limit 200 --out runs/decode_model.csv

# What caches cost real models, and docs/quality.md with it. Models are fetched into runs/models first. Two cores take
# about two minutes a cache with SmolLM2 and fifteen with Qwen2.5-Coder, tasks included; a run that was interrupted goes on.
# REAL=--quick measures a few windows and questions, and leaves results and page alone.
REAL ?=
$(VENV)/.real: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[real]'
	@touch $@

.PHONY: real
real: $(VENV)/.real
	$(BIN)/python -m caramba_fast.bench.real.models
	$(BIN)/python -m caramba_fast.bench.real.study $(REAL)
	$(if $(findstring --quick,$(REAL)),,$(BIN)/python -m caramba_fast.bench.real.study --long)
	$(BIN)/python -m caramba_fast.bench.real.prompts $(REAL)
	$(BIN)/python -m caramba_fast.bench.real.tasks $(REAL)
	$(if $(findstring --quick,$(REAL)),,$(BIN)/python -m caramba_fast.bench.pages.quality_page)

# Tokens/s, first tokens and memory of the real models beside OpenVINO GenAI, and llama.cpp where llama-cpp-python is
# installed; two hours.
.PHONY: bench-real
bench-real: $(VENV)/.real $(VENV)/.test $(VENV)/.peers
	-$(MAKE) $(VENV)/.llama
	$(BIN)/python -m caramba_fast.bench.real.models --gguf
	$(BIN)/python -m caramba_fast.bench.real.decode --prompts 1024 4096
	$(BIN)/python -m caramba_fast.bench.real.gguf_types
	$(BIN)/python -m caramba_fast.bench.real.weights
	$(BIN)/python -m caramba_fast.bench.pages.real_decode_page
	$(BIN)/python -m caramba_fast.bench.pages.report bench/results/cpu.csv > docs/performance.md

# What a quiet machine measured, as the page that is in the repository.
bench-page: $(VENV)/.test
	cp runs/bench-$(DEVICE).csv bench/results/$(DEVICE).csv
	cp runs/bench-$(DEVICE).json bench/results/$(DEVICE).json
	cp runs/decode_model.csv bench/results/ 2>/dev/null || true
	$(BIN)/python -m caramba_fast.bench.pages.report bench/results/cpu.csv > docs/performance.md
	$(BIN)/python -m caramba_fast.bench.pages.roofline bench/results/$(DEVICE).csv docs/roofline-$(DEVICE).png
	$(BIN)/python -m caramba_fast.bench.pages.gpu_page

# Both rewrite bench/results and the tables of docs/inference.md; half an hour on two cores.
bench-generation: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.generation.generation --publish
	$(BIN)/python -m caramba_fast.bench.generation.speculation --publish

# Rewrites bench/results/serve.csv and the tables of docs/serving.md.
bench-serve: export OMP_NUM_THREADS = 1
bench-serve: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.serving.serve --publish

# The same load through HTTP, over SmolLM2, which is fetched first, beside transformers' server and llama.cpp's, which is
# built in a quarter of an hour; rewrites bench/results/serve_http.csv and its table.
bench-http: export OMP_NUM_THREADS = 1
bench-http: $(VENV)/.test $(VENV)/.real
	$(BIN)/python -m caramba_fast.bench.real.models smollm2 --gguf
	-$(MAKE) $(LLAMA_SERVER)
	$(BIN)/python -m caramba_fast.bench.serving.over_http --peers --publish

# transformers' own quantized caches need packages of their own, which are put beside those of .venv. Half an hour on one core.
HF_PEERS := build/hf-peers
$(HF_PEERS)/.done: constraints.txt $(VENV)/.torch
	rm -rf $(HF_PEERS)
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --target $(HF_PEERS) optimum-quanto hqq accelerate termcolor einops psutil
	@touch $@

bench-hf: $(VENV)/.test $(HF_PEERS)/.done
	PYTHONPATH=$(HF_PEERS) $(BIN)/python -m caramba_fast.bench.generation.hf_decode --publish

# The same step in the caches of OpenVINO, ONNX Runtime, ggml and torch: rewrites bench/results/peers.csv and
# docs/peers.md. PEERS=--quick measures a few shapes and prints them. ggml is built from the source that llama-cpp-python
# carries, for this processor and with its own threads, in a few minutes; its rows say so where that fails.
PEERS ?= --publish
GGML  := build/peers/ggml/.done
.PHONY: bench-peers
$(VENV)/.peers: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[peers]'
	@touch $@

# llama.cpp's own decode, built for this processor: minutes. Where that fails, its rows are left out.
$(VENV)/.llama: constraints.txt $(VENV)/.torch
	CMAKE_BUILD_PARALLEL_LEVEL=2 CMAKE_ARGS="-DGGML_NATIVE=ON" $(PIP) llama-cpp-python
	@touch $@

LLAMA_SOURCE := build/peers/source/.done
$(LLAMA_SOURCE): constraints.txt | $(VENV)/.peers
	rm -rf build/peers
	mkdir -p build/peers/source
	$(BIN)/python -m pip download -q -c constraints.txt --no-deps --no-binary llama-cpp-python -d build/peers/source llama-cpp-python
	tar xzf build/peers/source/llama_cpp_python-*.tar.gz -C build/peers/source
	@touch $@

LLAMA_CMAKE = $(BIN)/cmake -S build/peers/source/llama_cpp_python-*/vendor/llama.cpp -G Ninja \
	-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=OFF \
	$(patsubst %,-DLLAMA_BUILD_%=OFF,TESTS EXAMPLES APP)
$(GGML): $(LLAMA_SOURCE)
	$(LLAMA_CMAKE) -B build/peers/ggml -DBUILD_SHARED_LIBS=ON $(patsubst %,-DLLAMA_BUILD_%=OFF,COMMON TOOLS SERVER)
	$(BIN)/cmake --build build/peers/ggml -j 2 --target ggml
	@touch $@

LLAMA_SERVER := build/peers/llama-server/bin/llama-server
$(LLAMA_SERVER): $(LLAMA_SOURCE)
	$(LLAMA_CMAKE) -B build/peers/llama-server -DBUILD_SHARED_LIBS=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
	$(BIN)/cmake --build build/peers/llama-server -j 2 --target llama-server

bench-peers: export OMP_NUM_THREADS = 1
bench-peers: $(VENV)/.peers
	-$(MAKE) $(GGML)
	$(BIN)/python -m caramba_fast.bench.peers.run $(PEERS)

bench-rows: $(VENV)/.test
	GRID=$(GRID) $(BIN)/python -m pytest --device=$(DEVICE) tests/bench/rows.py --benchmark-columns=median,iqr,rounds

# What is expected on an H200, from bench/results/aot.csv.
bench-predictions: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.kernels.predict
	$(BIN)/python -m caramba_fast.bench.pages.gpu_page

# What bench/gpu_check.sh installs on a machine without network: WHEELS=build/gpu-wheels. GPU_PYTHON is that machine's.
GPU_PYTHON ?= 3.12
.PHONY: gpu-wheels
gpu-wheels: $(VENV)/.torch
	rm -rf build/gpu-wheels
	$(BIN)/python -m pip download -q --only-binary :all: --python-version $(GPU_PYTHON) --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
		-d build/gpu-wheels pydantic pytest hypothesis setuptools wheel
	du -sh build/gpu-wheels

# The whole gate, with both Tritons at once: twenty minutes. make test compiles a part of it again. A kernel that is worse
# than recorded, or not recorded, leaves the table as it is; ACCEPT=1 records it.
AGAINST := $(if $(ACCEPT),,--against $(AOT))
aot: $(VENV)/.test $(OLDEST)/.done
	PYTHONPATH=$(OLDEST) $(BIN)/python -m caramba_fast.bench.kernels.aot $(AGAINST) --out build/aot-oldest.csv & \
		$(BIN)/python -m caramba_fast.bench.kernels.aot $(AGAINST) --out build/aot-newest.csv; \
		newest=$$?; wait $$! && exit $$newest
	(cat build/aot-oldest.csv; tail -n +2 build/aot-newest.csv) > build/aot.csv && mv build/aot.csv $(AOT)

# Every case of the emulator (tests/support/compiled_cases.py), with both Tritons at once: three minutes. make test runs a
# part of them again. A case that is wrong leaves the record as it is.
.PHONY: emulate
emulate: $(VENV)/.test $(OLDEST)/.done
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.emulated

train: $(VENV)/.demo
	for name in gqa dba; do \
		$(BIN)/python examples/train_demo.py --architecture $$name --out runs/demo-$$name && \
		$(BIN)/python examples/demo_card.py runs/demo-$$name --name $$name || exit 1; \
	done

train-biased: $(VENV)/.demo
	$(BIN)/python examples/train_biased.py

# An sdist, a wheel made from it without the demo models, and their own, in dist/. The wheel's tag is the oldest glibc that
# the extension runs with: the one of this machine, or older. torch's libraries are those of the torch that is installed.
WHEEL_BYTES := 3000000
$(VENV)/.release: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[release]'
	@touch $@

.PHONY: wheel
wheel: export CARAMBA_FAST_DEMO = 0
wheel: $(VENV)/.release
	rm -rf dist build/wheel build/lib build/bdist.* build/temp.*
	$(BIN)/python -m build --no-isolation --outdir build/wheel .
	if command -v readelf > /dev/null; then \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so \
			-w dist build/wheel/*.whl; \
	else mkdir -p dist && cp build/wheel/*.whl dist; fi
	cp build/wheel/*.tar.gz dist
	$(BIN)/python -m build --no-isolation --wheel --outdir dist demo
	$(BIN)/twine check --strict dist/*
	@for file in dist/caramba_fast-*.whl; do \
		size=$$(wc -c < $$file); echo "$$file: $$size bytes"; test $$size -lt $(WHEEL_BYTES); done

# The site, in build/site: links, anchors and the reference are checked, and a warning is an error.
.PHONY: docs
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict -q

clean:
	rm -rf build dist *.egg-info demo/dist caramba_fast/*.so .pytest_cache .ruff_cache .mypy_cache

# Older transformers, for the tests of the layer on top of it: PYTHONPATH puts one in front of the one in .venv. pip
# brings numpy along; the one torch was made for stays in use.
HF_TESTS    := tests/hf/test_generate.py tests/hf/test_rotary.py tests/hf/test_cache.py tests/hf/test_static_cache.py tests/hf/test_packed_reads.py \
               tests/hf/test_stock_caches.py tests/hf/test_accelerate.py tests/hf/test_allocation.py tests/hf/test_masks.py tests/hf/test_padding.py tests/hf/test_threads.py tests/hf/test_pickles.py \
               tests/hf/test_changing_rope.py tests/hf/test_step_calls.py
# Whether a step is one graph depends on transformers more than on the kind of cache, of which two are left.
HF_NOT      := one_graph and (fp32 or nf4)
.PHONY: test-hf-oldest

build/hf-%/.done: constraints-hf-%.txt $(VENV)/.torch
	rm -rf build/hf-$*
	$(BIN)/python -m pip install -q -c constraints-hf-$*.txt --target build/hf-$* transformers
	$(BIN)/python -m pip install -q -c constraints-hf-$*.txt --no-deps --target build/hf-$* kernels
	rm -rf build/hf-$*/numpy build/hf-$*/numpy-* build/hf-$*/numpy.libs
	@touch $@

test-hf-oldest: export OMP_NUM_THREADS = 1
test-hf-oldest: $(VENV)/.test $(HF_VERSIONS:%=build/hf-%/.done)
	printf '%s\n' $(HF_VERSIONS) | xargs -P 2 -I VERSION env PYTHONPATH=build/hf-VERSION \
		$(BIN)/python -m pytest -q -p no:cacheprovider -k 'not ($(HF_NOT))' $(HF_TESTS)

# Every block of README.md in order, in a fresh clone of what is committed and an environment of its own; five minutes.
.PHONY: readme
readme:
	$(PYTHON) .ci/readme $(EXTENSION)

# The lower bounds of what the package itself needs, put in front of the ones in .venv; transformers' are in test-hf-oldest.
LOWEST_TESTS := tests/config tests/infer/test_options.py tests/infer/test_refusals.py tests/policy/test_plan_file.py \
                tests/models/test_checkpoint.py tests/cli/test_plan.py
# The oldest safetensors cannot write what this test has refused.
LOWEST_NOT   := tests/models/test_checkpoint.py::test_weights_that_are_no_floats_are_refused[dtype3]
.PHONY: test-lowest
build/lowest/.done: constraints-lowest.txt $(VENV)/.test
	rm -rf build/lowest
	sed -n 's/==.*//p' constraints-lowest.txt > build/lowest.txt
	$(BIN)/python -m pip install -q -c constraints-lowest.txt --target build/lowest -r build/lowest.txt
	@touch $@

test-lowest: export OMP_NUM_THREADS = 1
test-lowest: build/lowest/.done
	PYTHONPATH=build/lowest $(BIN)/python -m pytest -q -p no:cacheprovider $(LOWEST_TESTS) --deselect '$(LOWEST_NOT)'

# transformers' own generation, cache and model tests over accelerated models. Their source is a checkout of the pinned
# version (its sdist leaves most tests out): TRANSFORMERS_SOURCE=FOLDER, or a shallow clone. UPSTREAM=--quick takes four
# families and a few minutes; all take more than an hour on two cores.
UPSTREAM_REPO       ?= https://github.com/huggingface/transformers
TRANSFORMERS_SOURCE ?= build/upstream/transformers
TRANSFORMERS        := $(shell sed -n 's/^transformers==//p' constraints.txt)
UPSTREAM            ?=
.PHONY: test-upstream

build/upstream/transformers/tests: constraints.txt
	rm -rf build/upstream/transformers
	GIT_TERMINAL_PROMPT=0 timeout 300 git clone -q --depth 1 --filter=blob:none --sparse --branch v$(TRANSFORMERS) \
		$(UPSTREAM_REPO) build/upstream/transformers
	git -C build/upstream/transformers sparse-checkout set tests utils
	@touch $@

build/upstream/site/.done: $(VENV)/.test
	rm -rf build/upstream/site
	$(PIP) --no-deps --target build/upstream/site parameterized accelerate psutil pytest-xdist execnet \
		httpx httpcore h11 anyio pillow
	@touch $@

test-upstream: export OMP_NUM_THREADS = 1
test-upstream: $(VENV)/.test build/upstream/site/.done $(TRANSFORMERS_SOURCE)/tests
	PYTHONPATH=build/upstream/site $(BIN)/python tests/support/upstream.py --source $(TRANSFORMERS_SOURCE) $(UPSTREAM)
