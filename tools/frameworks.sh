#!/usr/bin/env bash
# Make the environment for the tests of unbroken.integrations: `make test-integrations` calls this with its folder.
# It sees all of .venv, and has the packages of requirements-integrations.lock beside that. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly FOLDER=$1

if [ ! -x "$FOLDER/bin/python" ]; then
    printf 'frameworks: making %s\n' "$FOLDER"
    .venv/bin/python -m venv --without-pip "$FOLDER"
fi
site=$("$FOLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir(%s)\n' "'$base'" >"$site/venv.pth"
printf 'frameworks: installing %s packages of requirements-integrations.lock\n' "$(grep -c == requirements-integrations.lock)"
.venv/bin/python -m pip --disable-pip-version-check --python "$FOLDER/bin/python" install --quiet --no-deps --no-compile \
    --require-hashes -r requirements-integrations.lock
"$FOLDER/bin/python" -c 'import accelerate, lightning, torchdata, transformers, unbroken'
printf 'frameworks: done\n'
