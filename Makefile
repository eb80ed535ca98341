# `make help` lists the targets, each with its variables and their values.

PYTHON ?= python3
TORCH  ?=
VENV   := .venv$(if $(TORCH),-$(TORCH))
BIN    := $(VENV)/bin

RANKS  ?= 4
STEPS  ?= 300
LAYOUT ?= interleaved
DTYPE  ?= float32
DATA   ?=
HSDP   ?=
FLAT   ?=
STRATEGY ?=
RESUME ?= 1
MESH   ?=
OUT    ?= runs/$(if $(MESH),train_dimensions,train_gpt)
ARGS   ?=
# One more than the cores of a small machine: ranks of a test wait for each other.
WORKERS ?= 3
CASES  ?= 500
TRIALS ?= 300
COUNT  ?= 600
PACKAGE ?=
SEED   ?= 0
PART   ?= all
MODE   ?= numbers
DEVICE ?=
MINUTES ?= 9

TRAIN_FLAGS = --steps $(STEPS) --layout $(LAYOUT) --dtype $(DTYPE) --out $(OUT) \
	$(if $(DATA),--data "$(DATA)") $(if $(filter-out 0,$(HSDP)),--hsdp) \
	$(if $(STRATEGY),--strategy $(STRATEGY)) $(if $(filter-out 0,$(FLAT)),--flat) $(if $(filter 0,$(RESUME)),--no-resume)

MESH_FLAGS = --steps $(STEPS) --layout $(LAYOUT) --dtype $(DTYPE) --out $(OUT) $(if $(DATA),--data "$(DATA)") \
	$(if $(filter 0,$(RESUME)),--no-resume)

# A torch release other than the pinned one gets its own environment, with its own dependencies.
PINS = $(if $(TORCH),$(VENV)/)constraints.txt
PIP  = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS)

export OMP_NUM_THREADS ?= 1
# Tests and examples start many processes, each of which would otherwise compile the package again.
export PYTHONDONTWRITEBYTECODE =

.DELETE_ON_ERROR:
.PHONY: help train recommender clients finetune test bindings fuzz mutants mutate faults soak lint bench gpu verify docs clean
.DEFAULT_GOAL := help

SHOWN = $(foreach name,$(sort $(shell sed -nE 's/^[a-z]+:.*## .* : //p' Makefile)),$(name)=$($(name)))

help: ## show this list
	@awk -v shown='$(SHOWN)' -f .ci/help.awk Makefile
	@echo; echo 'make train RANKS=2 LAYOUT=contiguous STRATEGY=zero2 sets variables.'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

ifdef TORCH
$(PINS): constraints.txt | $(BIN)/python
	grep -vE '^(torch|setuptools)==' $< > $@
	echo torch==$(TORCH) >> $@
endif

# A stamp per set of dependencies: pip runs again only when a file that it reads has changed.
$(VENV)/.installed: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

train: $(VENV)/.installed ## train a small GPT on RANKS ranks, or on MESH=pp2,dp2,tp2; run it again to resume : RANKS STEPS LAYOUT STRATEGY FLAT HSDP DTYPE DATA RESUME MESH OUT ARGS
	$(BIN)/python $(if $(MESH),examples/train_dimensions.py --mesh $(MESH) $(MESH_FLAGS),examples/train_gpt.py --ranks $(RANKS) $(TRAIN_FLAGS)) $(ARGS)

recommender: $(VENV)/.installed ## train embedding tables sharded over RANKS ranks, and compare with the unsharded model : RANKS ARGS
	$(BIN)/python examples/recommender.py --ranks $(RANKS) $(ARGS)

ALONE = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

$(VENV)/.installed-clients: $(VENV)/.installed $(wildcard examples/clients/*.txt)
	$(PIP) -c examples/clients/constraints.txt -e '.[clients]'
	$(ALONE) -r examples/clients/without_dependencies.txt
	for one in torchtune timm; do $(ALONE) --upgrade --target $(VENV)/apart/$$one -r examples/clients/$$one.txt || exit; done
	touch $@

clients: $(VENV)/.installed-clients ## run accelerate, Trainer, TRL, torchtitan and more on FSDP2 and on shardwise, and compare losses : ARGS
	$(BIN)/python examples/clients/compare.py $(ARGS)

finetune: $(VENV)/.installed-clients ## fine-tune a small Llama with LoRA on RANKS ranks, then load it with transformers : RANKS LAYOUT ARGS
	PYTHONWARNINGS=ignore::FutureWarning $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/finetune.py \
		--layout $(LAYOUT) $(ARGS)

test: $(if $(TORCH),$(VENV)/.installed-dev,lint) ## run lint, type checks and all tests; TORCH=2.15.0: all tests on that release : WORKERS TORCH PYTHON
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10

# PyPI's torch for Linux is the CUDA build. `===` excludes other builds of a release, such as 2.13.0+cpu.
BOUND = $(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))
CUDA  = .venv-cuda-$(BOUND)

$(CUDA)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(CUDA)/constraints.txt
	echo torch===$(BOUND) >> $(CUDA)/constraints.txt
	$(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CUDA)/constraints.txt -e . pytest
	touch $@

bindings: $(CUDA)/.installed ## check calls of NCCL and CUDA against the bindings of TORCH's CUDA build (6 GB); needs no GPU : TORCH PYTHON
	$(CUDA)/bin/python -m pytest tests/comm/test_bindings.py

fuzz: $(VENV)/.installed-dev ## run CASES random cases from SEED against torch and one process : CASES SEED PART MODE ARGS
	PYTHONPATH=tests:.:examples $(BIN)/python -m fuzz --cases $(CASES) --seed $(SEED) --part $(PART) --mode $(MODE) $(ARGS)

mutants: $(VENV)/.installed-dev ## remove each wait, event and keep-alive in turn: which case detects it, 10 minutes; DEVICE=cuda: on a GPU : DEVICE
	PYTHONPATH=tests:.:benchmarks:examples $(BIN)/python -W ignore -m $(if $(DEVICE),mutants.device --out build/mutants_device.json,mutants --write)

mutate: $(VENV)/.installed-dev ## make COUNT small source changes, drawn from SEED over all packages or PACKAGE: which ones tests detect : COUNT SEED PACKAGE WORKERS
	PYTHONPATH=tests:. $(BIN)/python -W ignore -m mutation --count $(COUNT) --seed $(SEED) --workers $(WORKERS) \
		$(if $(PACKAGE),--package $(PACKAGE),--write)

faults: $(VENV)/.installed-dev ## inject TRIALS faults from SEED: ranks killed, stopped, slowed, disks full, bits flipped; then torchrun 4 -> 3 -> 4 ranks, and 3 hosts : TRIALS SEED
	PYTHONPATH=tests:.:examples $(BIN)/python -W ignore -m faults --trials $(TRIALS) --seed $(SEED) --write
	PYTHONPATH=tests:.:examples $(BIN)/python -W ignore -m faults.living --seed $(SEED) --write
	PYTHONPATH=tests:.:examples $(BIN)/python -m faults.elastic --seed $(SEED)
	PYTHONPATH=tests:.:examples $(BIN)/python -m faults.hosts --seed $(SEED)

soak: $(VENV)/.installed-dev ## run STEPS steps with background saves; memory, open files and threads must stay flat : RANKS STEPS
	PYTHONPATH=tests:.:examples $(BIN)/python -m faults.soak --steps $(STEPS) --ranks $(RANKS) --write

lint: $(VENV)/.installed-dev ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: $(VENV)/.installed ## compare training on one process with RANKS ranks, step by step, in both layouts : RANKS
	$(BIN)/shardwise verify examples/train_gpt.py --ranks $(RANKS) --layout both

$(VENV)/.installed-docs: $(VENV)/.installed docs/constraints.txt
	$(PIP) -c docs/constraints.txt -e '.[docs]'
	touch $@

docs: $(VENV)/.installed-docs ## build the documentation site, build/site/index.html; warnings and broken links are errors
	$(BIN)/python docs/site/recipes.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed ## run every benchmark against torch, about 20 minutes
	$(BIN)/python benchmarks/run_all.py

gpu: $(VENV)/.installed-dev ## check and measure every accelerator here in MINUTES; DEVICE=sim: a simulated one : DEVICE MINUTES ARGS
	$(BIN)/python benchmarks/gpu.py $(if $(DEVICE),--device $(DEVICE)) --minutes $(MINUTES) $(ARGS)

clean: ## remove what make and the tools created
	rm -rf .venv .venv-*.*.* runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
