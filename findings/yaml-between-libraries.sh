#!/usr/bin/env bash
# PyYAML and ruamel.yaml write texts and numbers without quotes that the other one reads as another type.
# Guess: both quote what could be misread, so a safe dump of one is a safe load of the other.
# Seen: PyYAML follows YAML 1.1 and ruamel.yaml 1.2. The name 1e3 becomes 1000.0 one way; no, 12:30 and 1e-05 change
# the other way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyyaml==6.0.4 ruamel.yaml==0.19.1
cd "$folder"
venv/bin/python - <<'END'
import io

import yaml
from ruamel.yaml import YAML


def ruamel_dump(value):
    text = io.StringIO()
    YAML(typ="safe").dump({"x": value}, text)
    return text.getvalue()


expected = {"1e3": 1000.0, "08": 8, "0o17": 15}
for value, other in expected.items():
    text = yaml.safe_dump({"x": value})
    found = YAML(typ="safe").load(text)["x"]
    print(f"PyYAML writes {text.strip()!r} for the text {value!r}; ruamel.yaml reads {found!r}")
    assert found == other and yaml.safe_load(text)["x"] == value
expected = {"no": False, "12:30": 750, 1e-05: "1e-05", 1e16: "1e+16"}
for value, other in expected.items():
    text = ruamel_dump(value)
    found = yaml.safe_load(text)["x"]
    print(f"ruamel.yaml writes {text.strip()!r} for {value!r}; PyYAML reads {found!r}")
    assert found == other and type(found) is not type(value) and YAML(typ="safe").load(text)["x"] == value
END
