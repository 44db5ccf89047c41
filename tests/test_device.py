import subprocess
import sys
from pathlib import Path


def test_tiny_numbers_count_as_zero_on_all_threads():
    """Runs in a separate process, because the setting lasts until the process ends."""
    code = (
        "import torch; from nas.core.config import TrainOptions; from nas.training.device import set_up_device; "
        "context = set_up_device(1, TrainOptions(threads=2, device='cpu')); print(context.name, context.threads); "
        "x = torch.full((3_000_000,), 1e-39); print((x * 1.0).count_nonzero().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["cpu 2", "0"], done.stderr
