import subprocess
import sys
from pathlib import Path


def test_tiny_numbers_count_as_zero_on_all_threads():
    """In a process of its own, since that holds from then on."""
    code = (
        "import torch; from nas.config import TrainOptions; from nas.device import set_up; "
        "machine = set_up(1, TrainOptions(threads=2, device='cpu')); print(machine.name, machine.threads); "
        "x = torch.full((3_000_000,), 1e-39); print((x * 1.0).count_nonzero().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["cpu 2", "0"], done.stderr
