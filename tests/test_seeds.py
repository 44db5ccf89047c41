"""experiments/seeds.py as a user types it, and the images of experiments/raster."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.making import load_script

ROOT = Path(__file__).parents[1]


def seeds(*arguments):
    command = [sys.executable, ROOT / "experiments" / "seeds.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_patterns_are_trained_once_per_seed_and_stand_side_by_side(tmp_path, small_yaml):
    patterns = [ROOT / "experiments" / "patterns" / f"{name}-6.yaml" for name in ("strided", "fixed")]
    given = [small_yaml, "--patterns", *patterns, "--out", tmp_path / "runs", "train.steps=4", "train.warmup_steps=1"]
    assert seeds(*given, "--seeds", 7).returncode == 0
    first = (tmp_path / "runs/strided-6-7/checkpoint.pt").stat().st_mtime_ns
    done = seeds(*given, "--seeds", 7, 8)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/strided-6-7/checkpoint.pt").stat().st_mtime_ns == first
    *_, strided, fixed, last = done.stdout.splitlines()
    assert strided.startswith("| strided-6 | sdsdsd | 2 |") and fixed.startswith("| fixed-6 | fdfdfd | 2 |")
    bits = [
        yaml.safe_load((tmp_path / f"runs/strided-6-{seed}/results.yaml").read_text())["valid"]["bits_per_byte"]
        for seed in (7, 8)
    ]
    assert bits[0] != bits[1]
    assert json.loads(last)["strided-6"]["valid"] == bits
    assert f"| {sum(bits) / 2:.4f} ± {abs(bits[0] - bits[1]) / 2:.4f} |" in strided  # standard error of a mean of two
    report = seeds(*given, "--seeds", 7, 8, 9, "--report")
    assert report.stdout.splitlines()[-1] == last and not (tmp_path / "runs/strided-6-9").exists()


def test_runs_of_other_patterns_or_options_are_refused(tmp_path, small_yaml):
    for folder, blocks in (("a", "[dense]"), ("b", "[sparse_fixed]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pattern.yaml").write_text(f"format: par-pattern/1\nblocks: {blocks}\n")
    one, two = (tmp_path / folder / "pattern.yaml" for folder in "ab")
    given = ["--out", tmp_path / "runs", "train.steps=2", "train.warmup_steps=0", "--seeds", 1]
    both = seeds(small_yaml, "--patterns", one, two, *given)
    assert both.returncode == 2 and "two files have one name (pattern pattern)" in both.stderr
    assert seeds(small_yaml, "--patterns", one, *given).returncode == 0
    for changed in (["--patterns", two], ["train.lr=0.5", "--patterns", one]):
        refused = seeds(small_yaml, *changed, *given)
        assert refused.returncode == 2 and "was started with another configuration" in refused.stderr


def test_a_run_that_fails_ends_it(tmp_path, small_yaml):
    done = seeds(small_yaml, "--patterns", tmp_path / "none.yaml", "--out", tmp_path / "runs")
    assert done.returncode == 2 and "cannot read the pattern file" in done.stderr


@pytest.fixture(scope="module")
def images():
    return load_script("raster/images")


def test_images_are_the_same_bytes_at_every_call_and_differ_between_splits(images, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "IMAGES", {"train": 3, "valid": 3, "test": 3})
    for folder in ("one", "two"):
        images.write_images(tmp_path / folder)
    texts = [(tmp_path / "one" / f"{split}.bin").read_bytes() for split in images.IMAGES]
    assert texts == [(tmp_path / "two" / f"{split}.bin").read_bytes() for split in images.IMAGES]
    assert len(set(texts)) == 3 and all(len(text) == 3 * 32 * 32 for text in texts)


def test_images_have_structure_in_both_directions(images):
    source = np.random.default_rng(5)
    stack = np.stack([images.made_image(source) for _ in range(40)]).astype(int)
    assert stack.min() >= 0 and stack.max() < images.LEVELS
    far = abs(stack - stack[:, ::-1, ::-1]).mean()
    for axis in (1, 2):
        assert abs(np.diff(stack, axis=axis)).mean() < 0.6 * far
