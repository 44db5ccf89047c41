import numpy as np
import pytest

from tests.making import load_script


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
    stack = np.stack([images.random_image(source) for _ in range(40)]).astype(int)
    assert stack.min() >= 0 and stack.max() < images.LEVELS
    far = abs(stack - stack[:, ::-1, ::-1]).mean()
    for axis in (1, 2):
        assert abs(np.diff(stack, axis=axis)).mean() < 0.6 * far
