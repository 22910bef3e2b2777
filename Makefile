# The project's commands; `make` alone lists them. None but `portability` needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= 4
# What installs packages: pip, since it reads a site's pip.conf. uv takes a third of the time.
INSTALL ?= $(BIN)/python -m pip install --disable-pip-version-check
VERSIONS ?= tested-versions.txt

.PHONY: help install demo test mutants alltests faults check docs bench gpu gpus portability clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(INSTALLED) ## .venv with torch and all that the recipes and tests need, in the versions that were tested

$(INSTALLED): pyproject.toml $(VERSIONS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet -c $(VERSIONS) -e '.[digits,fast,timm,export,frameworks,test,check]'
	touch $@

demo: install ## train MNIST's recipe on two ranks here, on digits that need no download
	$(BIN)/python launch.py recipe=mnist dataset=digits launcher=local ranks_per_node=2 device=cpu run_dir=runs/demo resume=auto epochs=10
	@$(BIN)/python -c "import json; s = json.load(open('runs/demo/summary.json')); \
	print(f\"test accuracy {s['val_top1']:.2%} on {s['val_samples']} digits; run directory runs/demo\")"

test: install ## all tests except the long ones, WORKERS=4 files at a time; Slurm tests without Slurm are skipped with a message
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long"

mutants: install ## put bugs into copies of the product, one at a time, and report which ones `make test` notices; ONLY=word
	$(BIN)/python -m tests.mutations workers=$(WORKERS) $(if $(ONLY),only=$(ONLY))

alltests: install ## all tests, the long ones too: more than an hour on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

faults: install ## inject every fault in tests/faults, the long ones too
	$(BIN)/python -m pytest tests/faults -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: install ## ruff and mypy, and that the tables in docs/ are up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.tables check

docs: install ## generate the tables in docs/ from the code
	$(BIN)/python -m tests.tables write

bench: install ## run the benchmarks against reference code; fails if a target is missed; OUT=folder for benchmarks.json; ONLY=name,name
	$(BIN)/python -m tests.benchmarks $(OUT) $(if $(ONLY),only=$(ONLY))

gpu: ## show on one GPU, with PYTHON's own torch, that every GPU path works and how fast; OUT=file.json; DRY=true: on a CPU; ONLY=name,name
	$(PYTHON) -m tests.gpu $(OUT) $(if $(ONLY),only=$(ONLY)) $(if $(DRY),dry=$(DRY))

gpus: ## the same for a node with several GPUs
	$(PYTHON) -m tests.gpu $(OUT) gpus=true $(if $(ONLY),only=$(ONLY)) $(if $(DRY),dry=$(DRY))

portability: ## install, demo and tests in chroots with Slurm 22.05, 24.11 and 26.05, and on the oldest torch and Python; root; ONLY=sid,oldest FOLDER=kept between runs
	$(PYTHON) tests/portability.py --workers $(WORKERS) $(if $(ONLY),--only $(ONLY)) $(if $(FOLDER),--folder $(FOLDER)) $(if $(TESTS),--tests "$(TESTS)") $(if $(OLDEST_PYTHON),--python $(OLDEST_PYTHON))

clean: ## remove .venv and caches; runs and data stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
