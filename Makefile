PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test check clean

demo: $(READY)
	$(VENV)/bin/python scripts/demo

test: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/test

check: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

$(READY): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,kubernetes]'
	touch $(READY)

clean:
	rm -rf $(VENV) build demo dist *.egg-info
