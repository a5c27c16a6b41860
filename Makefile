PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
READY := $(VENV)/.ready
PIP_INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
IMPORTED := kubernetes.client, parsl, tensorstore, torch, zarr, volpipe.cli.app, volpipe.runs.worker

SLURM := slurmctld slurmd slurm-client munge slurmdbd mariadb-server

.PHONY: demo docs figures reference test check compiled programs lists slurm browser prometheus kubernetes clean

demo: $(READY)
	$(VENV)/bin/python scripts/demo

# What apt installs comes while the checks work; meanwhile the tests are compiled, once and not by each of the processes
# that import them.
test:
	$(MAKE) --no-print-directory --jobs=3 check programs compiled
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/test

# The site, in build/site: open its index.html.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# Every figure of docs/; those of real tissue where VOLPIPE_DATA names the folder of the volumes.
figures: $(READY)
	$(VENV)/bin/python scripts/figures

# The pages of docs/reference, from the code.
reference: $(READY)
	$(VENV)/bin/python scripts/reference

check: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

compiled: $(READY)
	@unset PYTHONDONTWRITEBYTECODE; out=$$($(VENV)/bin/python -m pytest --collect-only -qq 2>&1) || { echo "$$out"; exit 1; }

# What tests use beside Python, one after another: apt works for one at a time.
programs:
	@MAKEFLAGS= $(MAKE) --no-print-directory slurm browser prometheus kubernetes

# The lists of packages, once for all, where one of the programs is missing.
lists:
	@export PATH="$$PATH:/usr/sbin"; \
	for name in slurmctld mariadbd chromium chromedriver prometheus promtool; do \
		command -v $$name >/dev/null || missing=1; \
	done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq >/dev/null 2>&1 || true; \
	fi

# For the tests on a real Slurm, which are skipped without; installed where apt and its rights are there.
slurm: lists
	@export PATH="$$PATH:/usr/sbin"; \
	if command -v slurmctld >/dev/null && command -v mariadbd >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SLURM) >/dev/null 2>&1; \
	then exit 0; fi; \
	echo "no Slurm could be installed; its tests are skipped"

# For the tests that look at what a browser draws, which are skipped without; installed where apt and its rights are there.
browser: lists
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver \
		>/dev/null 2>&1; \
	then exit 0; fi; \
	echo "no Chromium could be installed; its tests are skipped"

# For the test that lets a real Prometheus scrape a run, which is skipped without; installed where apt and its rights are there.
prometheus: lists
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends prometheus \
		>/dev/null 2>&1; \
	then exit 0; fi; \
	echo "no Prometheus could be installed; its tests are skipped"

# Which cluster the tests use beside their double; they skip what the environment does not name.
kubernetes:
	@for name in KUBECONFIG VOLPIPE_K8S_IMAGE VOLPIPE_K8S_NAMESPACE VOLPIPE_K8S_CLAIMS VOLPIPE_K8S_ADDRESS; do \
		if [ -z "$$(printenv $$name)" ]; then echo "no Kubernetes: $$name is not set; its tests are skipped"; exit 0; fi; \
	done; echo "tests use the Kubernetes of $$KUBECONFIG as well, namespace $$VOLPIPE_K8S_NAMESPACE"

# The nets of nnU-Net in tests need neither timm nor torchvision, which their library brings.
# pip would compile the modules of all packages on one core, which takes as long as to install them. What every command
# and worker imports is compiled here, as in the Dockerfile: where Python may not write bytecode, each would do it again.
$(READY): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) --no-deps dynamic-network-architectures
	$(PIP_INSTALL) --editable '.[dev,docs,kubernetes,models,notebook,tune,view]'
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -c "import $(IMPORTED)"
	touch $(READY)

clean:
	rm -rf $(VENV) build demo dist *.egg-info
