#!/usr/bin/env bash
# Build the container images with buildah: tools/images.sh BASE TAG, called by `make images`.
# BASE is an image with Python 3.11, by digest: a tag can point to something else tomorrow.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BASE=${1:-} TAG=${2:-}
if [[ ! $BASE =~ @sha256:[0-9a-f]{64}$ ]]; then
    echo "images: BASE: want an image by digest (python:3.11-slim@sha256:...), got '$BASE'" >&2
    exit 2
fi
if ! command -v buildah >/dev/null; then
    echo "images: want the program buildah, found none; see https://buildah.io" >&2
    exit 2
fi
for image in operator sidecar trainer-example; do
    echo "images: building unbroken/$image:$TAG"
    buildah build --build-arg "BASE=$BASE" --file "images/$image/Dockerfile" --tag "unbroken/$image:$TAG" .
done
