"""Record the golden losses again after an intended change: `python -m tests.golden`."""

import json
import tempfile
from pathlib import Path

from nas.core.config_loading import load_config
from tests.conftest import small_content, write_text_folder
from tests.making import STAGES, losses_of

GOLDEN = Path(__file__).parent / "golden.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.yaml"
        path.write_text(json.dumps(small_content(write_text_folder(Path(folder)), Path(folder) / "cache")))
        losses = {stage: losses_of(stage, load_config(path, overrides)) for stage, overrides in STAGES.items()}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
