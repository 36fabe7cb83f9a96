#!/usr/bin/env bash
# Make .venv from nothing but Python 3.11: `make setup` calls this when the lock file or pyproject.toml changed.
# Environment: PYTHON (interpreter to make .venv from, default python3.11). Safe to repeat; says what it does.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON=${PYTHON:-python3.11}
readonly TORCH=2.13.0
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly PIP=(.venv/bin/python -m pip --disable-pip-version-check)
# Python compiles a module when it is first imported: most of the thousands that are installed never are.
readonly INSTALL=("${PIP[@]}" install --quiet --no-deps --no-compile)

say() { printf 'setup: %s\n' "$*"; }
has_torch() { "$1" -c 'import torch, torch.distributed' >/dev/null 2>&1; }

seen=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || {
    say "PYTHON: want an interpreter, Python 3.11, got '$PYTHON', which does not start" >&2
    exit 1
}
if [ "$seen" != 3.11 ]; then
    say "PYTHON: want Python 3.11 (requirements-dev.lock is made for it), got $seen from '$PYTHON'" >&2
    exit 1
fi

if [ ! -x .venv/bin/python ]; then
    # A torch that the machine brings (one built for its GPU, say) is used through the system's site-packages.
    visibility=()
    if has_torch "$PYTHON"; then visibility=(--system-site-packages); fi
    say "making .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv "${visibility[@]}" .venv
fi

install_torch() {
    say "installing torch $TORCH for the CPU (about 200 MB)"
    "${INSTALL[@]}" "torch==$TORCH+cpu" 2>/dev/null || "${INSTALL[@]}" --index-url "$TORCH_CPU_INDEX" "torch==$TORCH"
}

torch=
if has_torch .venv/bin/python; then
    say "torch $(.venv/bin/python -c 'import torch; print(torch.__version__)') is there already"
else
    set -m # in a process group of its own, so that it can be ended when the other installation ends early
    install_torch &
    torch=$!
    set +m
    trap 'kill -- "-$torch" 2>/dev/null || true' EXIT
fi
say "installing $(grep -c == requirements-dev.lock) packages of requirements-dev.lock (half a minute; minutes with an empty cache)"
"${INSTALL[@]}" --require-hashes -r requirements-dev.lock
if [ -n "$torch" ]; then
    wait "$torch"
    has_torch .venv/bin/python || { say "torch $TORCH was installed and does not import" >&2; exit 1; }
fi

say "installing unbroken itself, editable"
"${INSTALL[@]}" --no-build-isolation -e .
"${PIP[@]}" check
say "done: .venv is ready"
