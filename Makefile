# Unbroken: the only way to run anything. `make` alone lists the targets.
SHELL := /bin/bash
export PYTHONSAFEPATH := 1
PYTHON ?= python3.11
BIN := .venv/bin
