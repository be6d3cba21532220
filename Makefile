# `make test` and `make demo` need Python 3.11 or newer and nothing else; both make .venv first.
PYTHON ?= python3
VENV := .venv
ENGINE := $(wildcard deepmemory/ops/cpu/*.cpp deepmemory/ops/cpu/*.h)

.PHONY: test demo docs venv clean

test: venv
	$(VENV)/bin/python -m pytest -n 2

demo: venv
	$(VENV)/bin/dmu paper adding --cells dmu,gru,lstm --runs 5 --epochs 20 --out runs/demo

docs: venv
	$(VENV)/bin/python -m sphinx -W docs build/docs

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(ENGINE)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build runs
