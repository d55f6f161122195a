#!/bin/bash
# Gradescope calls this once, as root, when it builds the image. It installs what grading needs.
set -eu
here=$(realpath "$(dirname "$0")/..")
python3 -c 'import ensurepip, venv' || { apt-get update && apt-get install -y python3 python3-venv; }
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup.sh: $(python3 --version) is too old: choose Ubuntu 24.04 or newer as the base image" >&2
    exit 1
}
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --disable-pip-version-check -c "$here/source/release/constraints.txt" \
    {{ packages | join(" ") }}
