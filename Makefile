# `make test` and `make demo` need Python 3.11 or newer and nothing else; both make .venv first.
PYTHON ?= python3
VENV := .venv
ENGINE := $(wildcard deepmemory/ops/cpu/*.cpp deepmemory/ops/cpu/*.h)

.PHONY: test test-examples sanitize demo report docs venv clean

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

demo: venv
	$(VENV)/bin/dmu paper adding --cells dmu,gru,lstm --runs 5 --epochs 20 --out runs/demo

# The pages and figures of the committed records. Git keeps the Markdown pages and the SVG figures that they show.
report: venv
	$(VENV)/bin/dmu report --out docs/reproduction --to docs/reproduction
	$(VENV)/bin/dmu report --out docs/gradients-study --to docs/gradients-study

docs: venv
	$(VENV)/bin/python -m sphinx -W docs build/docs

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(ENGINE)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build runs
