#!/usr/bin/env bash
# Build the container images with buildah: tools/images.sh BASE TAG [ARGUMENT...], called by `make images`.
# BASE is an image with Python 3.11, by digest: a tag can point to something else tomorrow. ARGUMENTs go to `buildah build`.
# One commit and one base give one image: files and image have the commit's time, not that of the build.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BASE=${1:-} TAG=${2:-}
shift $(($# < 2 ? $# : 2))
if [[ ! $BASE =~ @sha256:[0-9a-f]{64}$ ]]; then
    echo "images: BASE: want an image by digest (python:3.11-slim@sha256:...), got '$BASE'" >&2
    exit 2
fi
if ! command -v buildah >/dev/null; then
    echo "images: want the program buildah, found none; see https://buildah.io" >&2
    exit 2
fi
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
time_s=$(git log -1 --format=%ct 2>/dev/null || echo 0)
git diff --quiet HEAD 2>/dev/null || revision+=-dirty

for image in operator sidecar trainer-example; do
    echo "images: building unbroken/$image:$TAG"
    buildah build --build-arg "BASE=$BASE" --build-arg "VERSION=$TAG" --build-arg "REVISION=$revision" --timestamp "$time_s" \
        --file "images/$image/Dockerfile" --tag "unbroken/$image:$TAG" "$@" .
done
