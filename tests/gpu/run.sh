#!/bin/sh
# All GPU checks and a short benchmark, in under ten minutes on one GPU:
#
#   tests/gpu/run.sh                      on the first visible GPU
#   tests/gpu/run.sh --no-benchmark       checks alone
#   PYTHON=/opt/venv/bin/python tests/gpu/run.sh
#
# Needs a Python with torch and transformers, nothing installed of this repository, and no network.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
links="$root/build/typing/headrace"
mkdir -p "$links"
ln -sfn ../../../engine "$links/engine"
cd "$root"
PYTHONPATH="$root/build/typing:$root" exec "${PYTHON:-python3}" -m tests.gpu.run "$@"
