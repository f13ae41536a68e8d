# Everything a day needs: `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base-installed
STAMP := $(VENV)/.installed
# Run-config overrides and options of `murmurfl run`, such as ARGS="--set mu=2 --set num-clients=20".
ARGS ?=
SINCE ?= main

.PHONY: help install run test test-changed test-cases test-long test-base mutants golden test-deployment test-docs test-examples test-flower \
  test-processes test-frameworks deploy-demo docs package lint format types bench wheels clean

help:
	@echo "make run      one private federated training on scikit-learn's digits (ARGS=\"--set mu=2\")"
	@echo "make deploy-demo  the same over real nodes on this computer: TLS, node keys, a ledger each"
	@echo "make test     all tests, no network needed once installed"
	@echo "make test-changed  the tests that reach what differs from main (SINCE=COMMIT)"
	@echo "make mutants  small bugs, written and generated, put in one by one, each of which a test must notice (ARGS=--all)"
	@echo "make golden   what trainings exchange, to the last bit, here and in a commit (SINCE=main)"
	@echo "make test-cases  the cases and the heavy tests that \`make test\` leaves out; CI runs them"
	@echo "make test-long  before a release: audits, all cases, the pages' commands over real nodes, both versions of Flower"
	@echo "make test-base  what runs without the extras, in a clean environment of its own that goes with it"
	@echo "make test-deployment  the long tests with real nodes"
	@echo "make test-docs  the commands of docs/, over real nodes where they need some; CI leaves out what is long"
	@echo "make test-processes  what starts Flower's own processes: launches, nodes, packages"
	@echo "make test-flower  what speaks with Flower, under the supported version that is not installed"
	@echo "make test-frameworks  the notebooks of examples/, executed anew"
	@echo "make test-examples  the examples through \`flwr run\` and real nodes"
	@echo "make lint     ruff, the type checker, who imports whom, and no merge markers"
	@echo "make docs     the pages of docs/ as a site in build/docs"
	@echo "make package  wheel and sdist in build/package, checked as the registry would"
	@echo "make bench    benchmarks; ratios measured in one run"
	@echo "make wheels   asks the registry whether every base dependency has a wheel for aarch64"
	@echo "make install  the virtual environment in $(VENV) alone"

install: $(STAMP)

# A run needs the base, and its report matplotlib; tests, and all else that is made here, need the rest, which one installation brings.
$(BASE): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[reports]"
	touch $(BASE)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,docs]"
	touch $(BASE) $(STAMP)

run: $(BASE)
	$(BIN)/murmurfl run $(ARGS)

deploy-demo: $(BASE)
	$(BIN)/murmurfl deploy-demo $(ARGS)

# Two workers and the commands that tests start compile everything but once, whatever the environment says.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Those that a change can reach, by imports and names: SINCE is the commit it is compared with.
test-changed: $(STAMP)
	SINCE=$(SINCE) $(BIN)/python tests/changed.py $(ARGS)

# Ten minutes on two cores; ARGS="--seed 7" takes another sample, ARGS=--all tries all, ARGS="budget" those so called.
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(ARGS)

# One minute for each side: messages, ledgers, rounds and models of 120 trainings. ARGS="--only mu2" records some.
golden: $(STAMP)
	$(BIN)/python tests/golden.py since $(SINCE) $(ARGS)

# The cases and the heavy tests that `make test` leaves out: minutes on two cores.
test-cases: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist load -m "more_cases and not long" $(ARGS)

# Before a release: what is slow and rarely wrong, real nodes, and what CI leaves out of pages and of Flower's other
# version. Two hours and a half on two cores. The pages' tests over nodes build on each other within a file: they have a
# run of their own.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist load -m "(long or more_cases) and not docs" $(ARGS)
	$(MAKE) test-deployment
	$(MAKE) test-docs PAGES="docs and long"
	$(MAKE) test-flower PROCESSES="tests/app/engines/test_ray.py tests/deployment"

# A second virtual environment, without PyTorch, made from the wheel and removed again: two minutes, pip and 1 GB of disk.
test-base: $(STAMP)
	$(BIN)/python -m pytest -m base tests/test_base_environment.py $(ARGS)

# Real SuperLinks and SuperNodes, killed, cut off and lied to: one after the other, half an hour on two cores.
test-deployment: $(STAMP)
	$(BIN)/python -m pytest -m deployment tests/deployment $(ARGS)

# The commands of docs/ as a reader types them: half an hour on two cores, and minutes with PAGES="docs and not long". The
# files have ports, homes and folders of their own.
PAGES ?= docs
test-docs: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$(PAGES)" tests/test_docs_commands.py tests/deployment/test_walkthrough.py \
	  tests/deployment/test_operations.py tests/deployment/test_federation_page.py $(ARGS)

# The core of what starts the installed Flower's processes: a run, a launch, a deployment with a closed server, a package.
# Three minutes. `make test-long` has it too, with the diagnosis of real servers and the other runs on Ray. The README's
# other commands are run by `make run` and, those that pages have too, by `make test-docs`.
test-processes: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long and not docs" \
	  tests/test_readme.py::test_plain_flwr_run_does_what_the_overrides_say \
	  tests/app/engines/test_ray.py::test_ray_gives_the_in_process_engines_model \
	  tests/app/engines/test_launch.py tests/deployment tests/test_packaging.py $(ARGS)

# What speaks with Flower, under the oldest and the newest supported version; the installed one has the other targets.
# One file starts real processes, and for `make test-long` all that do.
FLOWERS ?= 1.41.0 1.42.0
PROCESSES ?= tests/deployment/test_deployment.py
test-flower: $(STAMP)
	set -e; for version in $(FLOWERS); do \
	  if $(BIN)/python -m pip list --format freeze | grep -qx "flwr==$$version"; then continue; fi; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target build/flwr-$$version "flwr==$$version"; \
	  PYTHONPATH=$(CURDIR)/build/flwr-$$version $(BIN)/python -m pytest -n 2 --dist loadfile \
	    $$(grep -rlE "^(from|import) flwr" --include="test_*.py" tests/clients tests/strategies) $(ARGS); \
	  PYTHONPATH=$(CURDIR)/build/flwr-$$version $(BIN)/python -m pytest -n 2 --dist loadfile \
	    -m "not deployment and not docs and not more_cases" $(PROCESSES) $(ARGS); \
	done

# The notebooks' cells, in a kernel of this environment: minutes.
test-frameworks: $(STAMP)
	$(BIN)/python -m pytest -m frameworks tests/examples/test_notebooks.py $(ARGS)

# Each example as its README starts it: minutes.
test-examples: $(STAMP)
	$(BIN)/python -m pytest -m examples tests/examples $(ARGS)

# Links that lead nowhere and docstrings that do not parse end it.
docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# Wheel and sdist, as they would be published (CONTRIBUTING.md). Needs the network: the build has an environment of its own.
package: $(STAMP)
	rm -rf build/package
	$(BIN)/python -m build --outdir build/package >build/package.log 2>&1 || { cat build/package.log; exit 1; }
	$(BIN)/python -m twine check --strict build/package/*

# The type checker reads the standard library of each Python that is declared; ruff knows the oldest.
PYTHONS ?= 3.11 3.12 3.13
lint: $(STAMP)
	git grep -nE '^(<{7}|>{7}|[|]{7})( |$$)'; test $$? -eq 1  # merge markers; 1: none in a tracked file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p build/layers/murmurfl && ln -sfn $(addprefix $(CURDIR)/,app clients privacy strategies app/wheel/__init__.py) build/layers/murmurfl
	cd build/layers && ../../$(BIN)/lint-imports ../../pyproject.toml --no-cache
	printf '%s\n' $(PYTHONS) | xargs -n 1 -P 2 $(BIN)/basedpyright --pythonversion

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Takes about half an hour and, for other frameworks' environments, the network. ARGS="--without-peers" does without it,
# ARGS="--only bare" measures one part.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.pages

# Needs the network; installs nothing.
wheels: $(STAMP)
	$(BIN)/python -m benchmarks.wheels $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
