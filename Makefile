# Every target does its own set-up in .venv. Variables travel as environment, so no value needs quoting:
#   SCALE=smoke|laptop|cpu|paper  ONLY=<experiment,...>  SEEDS=0,1,2  JOBS=<workers>  DATA=<folder>  RUNS=<folder>
#   LOGGER=jsonl|wandb  DEVICE=auto|cpu|cuda  REUSE=1 (committed rows count as done)  FORCE=1 (let a report shrink)
#   FRESH=1 (rerun stale runs)  RESULTS=<folder>
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export SCALE ONLY SEEDS JOBS LOGGER DEVICE REUSE FORCE FRESH RESULTS
ifdef DATA
export BACKRANK_DATA := $(DATA)
endif
ifdef RUNS
export BACKRANK_RUNS := $(RUNS)
endif

.DEFAULT_GOAL := help
.PHONY: help install test lint bench reproduce readme status sync-wandb dashboards

help:  ## This list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 30
	@sed -n '2,4s/^#//p' Makefile

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	@touch $@

install: $(VENV)/installed  ## Everything into .venv, from pyproject.toml

test: $(VENV)/installed  ## All tests (no GPU, no network; tests on real data need BACKRANK_DATA)
	$(RUN) -m pytest -n auto --maxprocesses 8 --dist worksteal

lint: $(VENV)/installed  ## Style and simple faults
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

bench: $(VENV)/installed  ## Timings as ratios within one run; writes results/bench/bench.md (ONLY=<group,...>)
	$(RUN) scripts/bench.py

reproduce: $(VENV)/installed  ## Every paper that has experiments
	$(RUN) -m backrank.reproduce run

reproduce-%: $(VENV)/installed  ## One paper: run or continue its experiments, then its report (reproduce-causal-test)
	$(RUN) -m backrank.reproduce run $*

plan-%: $(VENV)/installed  ## What that would run: runs done and left, hours, disk, data
	$(RUN) -m backrank.reproduce plan $*

report-%: $(VENV)/installed  ## The report alone, from the runs that are there
	$(RUN) -m backrank.reproduce report $*

recheck-%: $(VENV)/installed  ## One run of each stale arm again: do the committed rows count under the current code?
	$(RUN) -m backrank.reproduce recheck $*

readme: $(VENV)/installed  ## Write the README's verdicts from the committed claims
	$(RUN) -m backrank.analysis.readme

status: $(VENV)/installed  ## State of every run of the plans
	$(RUN) -m backrank.reproduce status

sync-wandb: $(VENV)/installed  ## Send finished runs to W&B from their own files
	$(RUN) scripts/sync_wandb.py

dashboards: $(VENV)/installed  ## Build the W&B dashboards of ENTITY=<team>
	$(RUN) scripts/wandb_dashboard.py --entity "$(ENTITY)" --scale "$(or $(SCALE),laptop)"
