#!/usr/bin/env bash
# Install a scanner into .cache/, from tools/scanners/NAME.lock and by hash; the path of its program is the only output.
# Each has an environment of its own: what they need contradicts each other, and the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly NAME=$1
lock=tools/scanners/$NAME.lock
target=.cache/$NAME-$(sha256sum "$lock" | cut -c1-16)
if [[ ! -e $target/done ]]; then
    rm -rf "$target"
    "${PYTHON:-python3.11}" -m venv "$target"
    "$target/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r "$lock" >&2
    touch "$target/done"
fi
echo "$PWD/$target/bin/$NAME"
