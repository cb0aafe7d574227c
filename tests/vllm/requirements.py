"""Prints what a vLLM wheel requires, less the torch family: text on a CPU needs only torch."""

import re
import sys
import zipfile

SKIPPED = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    for line in wheel.read(name).decode().splitlines():
        if line.startswith("Requires-Dist:"):
            requirement = line.split(":", 1)[1].strip()
            if "extra ==" not in requirement and not SKIPPED.match(requirement):
                print(requirement)
