# Everything a person does here. `make` alone lists it.
.DEFAULT_GOAL := help
.PHONY: help environment lock lab test test-all test-nightly test-cluster faults gpu cluster check format notebooks pictures slides site release bench clean

unexport PYTHONDONTWRITEBYTECODE # hundreds of processes start sooner where modules are compiled
VENV ?= .venv
BIN = $(abspath $(VENV))/bin
LESSON ?= notebooks/00_ranks.ipynb
# ranks wait for each other, and kernels for their start: two cores are busy with four workers
WORKERS ?= $(shell "$(BIN)/python" -c "import os; print(min(12, len(os.sched_getaffinity(0)) * 2))" \
	2>/dev/null || echo 4)
PYTEST = "$(BIN)/python" -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SCHEMA = "$(BIN)/check-jsonschema" --default-filetype yaml --builtin-schema vendor.
FAULTS ?= $(wildcard tests/cluster/faults_*.py)
BENCHMARKS ?= $(wildcard tests/benchmarks/bench_*.py)

# Any Python from 3.6 on can say what is wrong; environment.py picks the one to build with.
STARTER = for python in python3 python python3.13 python3.12 python3.11 "$(PYTHON)"; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1 && break; \
	python=; done

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

environment: ## build what the others need, at their first use (TORCH=cpu or gpu: which PyTorch)
	@$(STARTER); if test -z "$$python"; then echo "The course needs Python 3.11 or newer; here is none.\
	 Install one from your system's packages or python.org, or name one:\
	 make lab PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	exec "$$python" tools/environment.py --venv "$(VENV)" --python "$(PYTHON)" --torch "$(TORCH)"

lock: ## take the newest versions that pyproject.toml allows, into requirements.lock
	@"$(BIN)/python" tools/packages.py "$(VENV)" || { test -x "$(BIN)/python" || echo "Try make environment first"; exit 1; }

lab: environment ## open JupyterLab on the first lesson (LESSON=notebooks/04_collectives.ipynb: another)
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m jupyterlab --allow-root \
		--ServerApp.root_dir="$(CURDIR)" $(LAB_ARGS) "$(LESSON)"

test: environment ## the laws, the checks, a notebook (TEST_ARGS=tests/ddp: those; CHANGED=1: what a change reaches)
	@PATH="$(BIN):$$PATH" $(PYTEST) $(if $(CHANGED),--changed=$(CHANGED),--tier quick) $(TEST_ARGS)

test-all: environment ## what CI runs: also the browser, Slurm, torchrun, frameworks, grading, README
	@PATH="$(BIN):$$PATH" $(PYTEST) --tier ci $(TEST_ARGS)

test-nightly: environment ## everything: also every notebook, world size, planted mistake
	@PATH="$(BIN):$$PATH" $(PYTEST) --tier all $(TEST_ARGS)

test-cluster: environment ## what takes minutes on a live Slurm: nodes that go, preemption, time limits
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m pytest $(FAULTS) $(TEST_ARGS)

faults: environment ## the long proofs that tests sample: 200 kills (FAULTS_ARGS="--kills 20"), every hostile answer
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m tests.checkpoint.faults_kill $(FAULTS_ARGS)
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m pytest tests/grading/faults_*.py $(TEST_ARGS)

gpu: environment ## try every path that computes on a GPU, and record it (GPU_ARGS="--only memory")
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m tests.gpu $(GPU_ARGS)

cluster: environment ## keep a Slurm of two nodes on this machine until Ctrl-C (CLUSTER_ARGS="--nodes 4")
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m tools.cluster $(CLUSTER_ARGS)

check: environment ## lint, types, spelling, links, file sizes, workflows
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"
	@"$(BIN)/codespell"
	@"$(BIN)/python" tools/check_files.py
	@$(SCHEMA)github-workflows .github/workflows/*.yml
	@$(SCHEMA)github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@$(SCHEMA)citation-file-format CITATION.cff

format: environment ## put all code in the one layout
	@"$(BIN)/ruff" format .
	@"$(BIN)/ruff" check --fix .

notebooks: environment ## rebuild the notebooks from notebooks/source
	@PATH="$(BIN):$$PATH" "$(BIN)/python" -m course_tools.authoring.build $(NOTEBOOKS_ARGS)

pictures: environment ## draw the README's pictures again: a measurement, and a lesson in JupyterLab
	@for name in predict_run_compare screenshot; do \
		"$(BIN)/python" -m docs.$$name || exit 1; done

slides: environment ## slides as HTML, PDF and handouts in build/slides (needs Node.js and chromium)
	@"$(BIN)/python" tools/slides.py

site: environment ## build the website in build/site (SITE_ARGS="--for instructors": with solutions)
	@"$(BIN)/python" tools/build_site.py $(SITE_ARGS)

bench: environment ## measure, and print the tables
	@for script in $(BENCHMARKS); do echo "== $$script"; \
		"$(BIN)/python" -m "$$(echo "$${script%.py}" | tr / .)" || exit 1; done

release: environment ## a wheel with the lessons, and a zip for students, of the last commit
	@"$(BIN)/python" tools/release.py

clean: ## delete what the other targets built; notebooks, run records and .venv stay
	@rm -rf build slides/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find course_lib course_tools tests tools slides -name __pycache__ -prune -exec rm -rf {} +
