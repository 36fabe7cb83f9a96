#!/usr/bin/env bash
# Make an environment for the tests of unbroken.integrations: `make test-integrations` calls this with its folder and a
# lock. It sees all of .venv, and has the packages of the lock beside that. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly FOLDER=$1 LOCK=$2

if [ ! -x "$FOLDER/bin/python" ]; then
    printf 'frameworks: making %s\n' "$FOLDER"
    .venv/bin/python -m venv --without-pip "$FOLDER"
fi
site=$("$FOLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir(%s)\n' "'$base'" >"$site/venv.pth"
printf 'frameworks: installing %s packages of %s\n' "$(grep -c == "$LOCK")" "$LOCK"
.venv/bin/python -m pip --disable-pip-version-check --python "$FOLDER/bin/python" install --quiet --no-deps --no-compile \
    --require-hashes -r "$LOCK"
for name in accelerate lightning torchdata torchtitan transformers unbroken; do
    if [ "$name" = unbroken ] || grep -q "^$name==" "$LOCK"; then "$FOLDER/bin/python" -c "import $name"; fi
done
printf 'frameworks: done\n'
