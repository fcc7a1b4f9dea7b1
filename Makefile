# Each target does all its own set-up: `make train` on a fresh machine needs python3 with venv, make and a package index.
VENV      ?= .venv
ARGS      ?=
PIP_ARGS  ?=
SHELL     := /bin/bash
PY        := $(VENV)/bin/python
SETUP     := $(VENV)/.setup-train
SETUP_DEV := $(VENV)/.setup-dev
INPUTS    := setup.cfg setup.py pyproject.toml constraints.txt
BUSY      := $(VENV)/.busy

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev train test lint bench devcluster clean
.DELETE_ON_ERROR:

help:
	@echo "clusterenv_hpc: one learner and many environment workers on MPI ranks."
	@echo
	@echo "  make train                        install into $(VENV), train PPO on LunarLander-v3 with two workers"
	@echo "  make train ARGS=\"env=cartpole\"    the same with Hydra overrides; 'clusterenv-hpc train --help' lists the keys"
	@echo "  make setup                        only install (quick when nothing changed)"
	@echo "  make test [ARGS=\"-k sync\"]        linters, types, the whole test suite; ARGS go to pytest. As root on Debian or"
	@echo "                                    Ubuntu it first installs the packages of a Slurm cluster for the tests"
	@echo "  make lint                         ruff and mypy alone"
	@echo "  make bench                        rollout, transport and learner benchmarks, as JSON"
	@echo "  make devcluster                   a real Slurm cluster of three nodes on this machine (Debian packages, root)"
	@echo "  make clean                        remove $(VENV) and build leftovers; runs/ stays"
	@echo
	@echo "  VENV=DIR      another virtual environment        PYTHON=python3.12   another Python (3.10 to 3.13)"
	@echo "  PIP_ARGS=...  passed to pip: on a machine without a GPU the index of torch's CPU builds saves gigabytes"
	@echo
	@echo "  Then:  source $(VENV)/bin/activate;  clusterenv-hpc doctor   says what this machine can do."

setup: $(SETUP)
	@echo "$(VENV) is ready: source $(VENV)/bin/activate"
setup-dev: $(SETUP_DEV)

# A stamp is written last, so that a half-made environment is never taken for a whole one.  The busy file holds the
# installing shell's pid: one left by a dead process means packages that may be half copied, and a fresh start.
ifneq ($(shell [ -x $(PY) ] && [ ! -e $(BUSY) ] || echo stale),)
.PHONY: $(SETUP) $(SETUP_DEV)
endif

define install
	@set -eu; \
	if [ -e $(BUSY) ] && kill -0 "$$(cat $(BUSY))" 2>/dev/null; then \
		echo "Another make (pid $$(cat $(BUSY))) is installing into $(VENV); wait for it, or end it." >&2; exit 1; fi; \
	if ! $(PY) -m pip --version >/dev/null 2>&1 || [ -e $(BUSY) ]; then \
		python=; \
		for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
			if $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
				python=$$p; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "No Python 3.10 to 3.13 found as $(or $(PYTHON),python3). Install one (apt install python3 python3-venv)" \
				"or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; fi; \
		if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "$$python cannot make virtual environments (no ensurepip). As root: apt install python3-venv" >&2; \
			exit 1; fi; \
		if [ -e $(VENV) ] && [ ! -e $(VENV)/pyvenv.cfg ] && [ -n "$$(ls -A $(VENV) 2>/dev/null)" ]; then \
			echo "$(VENV) exists and is no virtual environment; choose another: make $(MAKECMDGOALS) VENV=DIR" >&2; \
			exit 1; fi; \
		echo "Making a virtual environment in $(VENV) with $$python"; \
		$$python -m venv --clear $(VENV); \
	fi; \
	echo $$$$ >$(BUSY); \
	echo "Installing clusterenv_hpc[$(EXTRAS)] into $(VENV)"; \
	export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1; \
	quiet=-q; if [ -t 1 ]; then quiet=; fi; \
	if $(PY) -m pip install $$quiet -c constraints.txt $(PIP_ARGS) setuptools && \
		$(PY) -m pip install $$quiet -c constraints.txt $(PIP_ARGS) --no-build-isolation -e ".[$(EXTRAS)]"; \
	then rm -f $(BUSY); \
	else rm -f $(BUSY); echo "pip failed; its message is above. Run the same command again to go on." >&2; exit 1; fi; \
	touch $@
endef

$(SETUP): EXTRAS = mpich,box2d
$(SETUP): $(INPUTS)
	$(install)

$(SETUP_DEV): EXTRAS = dev
$(SETUP_DEV): $(INPUTS)
	$(install)
	@touch $(SETUP)

train: $(SETUP)
	$(VENV)/bin/clusterenv-hpc train env=lunarlander workers=2 $(ARGS)

# First what the tests on a real Slurm cluster need, where this machine may install it (root on Debian or Ubuntu; nothing
# to do the next time).  Then all three run, whatever the first says; pytest's closing line stands last.
test: $(SETUP_DEV)
	@if said=$$(timeout -k 10 600 slurm/devcluster/install --sacct 2>&1 </dev/null); then \
		if [ -n "$$said" ]; then echo "$$said"; fi; \
	elif [ "$${CI:-}" = true ]; then \
		printf '%s\nCI: no test may be skipped for want of these packages\n' "$$said" >&2; exit 1; \
	else \
		echo "$${said##*$$'\n'} (until then the tests that need it are skipped)"; \
	fi
	@failed=; \
	$(PY) -m ruff check . || failed="$$failed ruff"; \
	$(PY) -m mypy || failed="$$failed mypy"; \
	$(PY) -m pytest -n 2 --no-loadscope-reorder $(ARGS) || failed="$$failed pytest"; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

lint: $(SETUP_DEV)
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(SETUP)
	$(VENV)/bin/clusterenv-hpc bench rollout $(ARGS)
	$(VENV)/bin/clusterenv-hpc bench transport $(ARGS)
	$(VENV)/bin/clusterenv-hpc bench learner $(ARGS)

devcluster:
	slurm/devcluster/up

clean:
	if [ -e $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
