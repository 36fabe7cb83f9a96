#!/usr/bin/env bash
# Make an environment with another release of torch: `make test-torch` calls this with its folder and the release. It sees
# all of .venv, and has that torch, with what it needs, before the one there. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly FOLDER=$1 RELEASE=$2

if [[ ! $RELEASE =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
    printf "torch: TORCH: want a release such as 2.15.0, got '%s'\n" "$RELEASE" >&2
    exit 1
fi
if [ ! -x "$FOLDER/bin/python" ]; then
    printf 'torch: making %s\n' "$FOLDER"
    .venv/bin/python -m venv --without-pip "$FOLDER"
fi
site=$("$FOLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ ! -d "$site/torch" ]; then
    printf 'torch: installing torch %s (gigabytes, since it brings CUDA)\n' "$RELEASE"
    .venv/bin/python -m pip --disable-pip-version-check --python "$FOLDER/bin/python" install --quiet --no-compile "torch==$RELEASE"
fi
# Only now: pip would take what is there for the environment's own, and remove it.
printf 'import site; site.addsitedir(%s)\n' "'$base'" >"$site/venv.pth"
seen=$("$FOLDER/bin/python" -c 'import torch, torch.distributed, unbroken; print(torch.__version__)')
printf 'torch: testing with %s\n' "$seen"
