# Shortcuts.
.PHONY: demo test check soak properties peers simulate fuzz bench docs docs-check dist matrix

demo:  ## the main job: a model over three processes learns to read digits
	tools/setup
	.venv/bin/zmqgrad run --nproc-per-node 3 examples/digits_pipeline.py

test:  ## set up, then all checks and all tests
	tools/test

soak:  ## calls, references, backward passes and watches under faults for MINUTES (60); nothing may grow
	tools/setup
	.venv/bin/python -m tools.soak --minutes $(or $(MINUTES),60)

peers:  ## the examples over torch's RPC and over Ray, to compare
	tools/setup
	.venv/bin/python -m pytest --numprocesses 2 -m peers

properties:  ## property tests with 5,000 examples each, for hours
	tools/setup
	HYPOTHESIS_PROFILE=soak .venv/bin/python -m pytest -q -m "not processes" --timeout 0

simulate:  ## drawn programs under the seeded scheduler, with faults, for MINUTES (10); random seeds
	tools/setup
	.venv/bin/python -m zmqgrad.testing.simulation --minutes $(or $(MINUTES),10)

fuzz:  ## every decoder, guided by coverage, for SECONDS (60) each
	tools/setup
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --group fuzz
	.venv/bin/python -m tools.fuzz --seconds $(or $(SECONDS),60)

bench:  ## the same work through zmqgrad and through torch, side by side
	tools/setup
	.venv/bin/python -m tools.bench

check:  ## format, lint, types, arrows, fast tests
	tools/check

docs:  ## the documentation site, in build/site
	tools/setup
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --group docs
	tools/docs/scripts
	.venv/bin/python -m tools.docs.site

docs-check: docs  ## every page of the site in headless Chromium, on a desktop and a phone, light and dark; and searches
	.venv/bin/python -m tools.docs.visit
	.venv/bin/python -m tools.docs.search

dist:  ## sdist and wheel of the last commit in dist/, tried in an environment of their own
	tools/setup
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --group release
	.venv/bin/python -m tools.release

matrix:  ## tests on each supported Python and torch, and docs/support.md (downloads gigabytes)
	tools/setup
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --group matrix
	.venv/bin/python -m tools.matrix
