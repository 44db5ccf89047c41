import subprocess
import sys

import pytest
import torch

from nas.core.config import TrainOptions
from nas.core.run_folder import cpu_info
from nas.training import device
from nas.training.device import choose_runtime
from nas.training.optimizer import orthogonalise
from tests.processes import ROOT


def test_tiny_numbers_count_as_zero_on_all_threads():
    """Runs in a separate process, because the setting lasts until the process ends."""
    code = (
        "import torch; from nas.core.config import TrainOptions; from nas.training.device import set_up_device; "
        "runtime = set_up_device(1, TrainOptions(threads=2, device='cpu')); print(runtime.name, runtime.threads); "
        "x = torch.full((3_000_000,), 1e-39); print((x * 1.0).count_nonzero().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["cpu 2", "0"], done.stderr


def test_entries_of_the_cpu_are_read(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Fast: 9\nflags\t\t: fpu sse\nprocessor\t: 1\nflags\t: other\n")
    assert [cpu_info(key, file) for key in ("model name", "flags", "Features")] == ["Fast: 9", "fpu sse", ""]
    assert cpu_info("flags", tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("flags", "precision", "expected"),
    [
        ("fpu avx512_bf16 sse", "auto", True),
        ("fpu amx_bf16", "bf16", True),
        ("fpu avx512_bf16", "fp32", False),
        ("fpu avx512f", "auto", False),
        ("", "auto", False),
    ],
)
def test_muon_uses_bf16_on_a_cpu_with_instructions_for_it(monkeypatch, flags, precision, expected):
    monkeypatch.setattr(device, "cpu_info", lambda key: flags)
    runtime = choose_runtime(TrainOptions(device="cpu", precision=precision))
    assert runtime.muon_bf16 == expected and (runtime.precision == "bf16") == (precision == "bf16")
    assert ("fp32 (Muon's products bf16)" in str(runtime)) == (expected and precision == "auto")
    adamw = choose_runtime(TrainOptions(device="cpu", precision=precision, optimizer="adamw"))
    assert not adamw.muon_bf16 and "Muon" not in str(adamw)


def test_muon_in_bf16_makes_nearly_the_same_update():
    matrices = torch.randn(3, 40, 60, generator=torch.Generator().manual_seed(0))
    exact, low = orthogonalise(matrices), orthogonalise(matrices, in_bf16=True)
    assert low.dtype == torch.float32 and not torch.equal(exact, low)
    torch.testing.assert_close(exact, low, rtol=0, atol=0.02)
