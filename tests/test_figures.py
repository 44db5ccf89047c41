import imageio.v3 as imageio
import numpy as np
import pytest

from nas.reporting import curves, pi_figures
from nas.reporting.style import COLOURS

NAMES = ["attention", "dense", "identity"]


def history(steps, blocks=6):
    source = np.random.default_rng(0)
    logits = np.cumsum(source.normal(0, 0.2, (steps, blocks, 3)), axis=0)
    pi = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return [
        {"step": 10 * t, "temperature": 1 / (t + 1), "operations": NAMES, "pi": pi[t].tolist()} for t in range(steps)
    ]


def test_frames_are_spread_and_include_both_ends():
    assert pi_figures.choose_frames(5) == [0, 1, 2, 3, 4]
    many = pi_figures.choose_frames(1000)
    assert len(many) == pi_figures.MAX_FRAMES and many[0] == 0 and many[-1] == 999
    assert max(np.diff(many)) <= 7


def test_darkness_is_probability_which_is_written_on_the_likeliest_operation():
    picture = pi_figures.PiPicture(NAMES, 3)
    pi = [[0.05, 0.9, 0.05], [1.0, 0.0, 0.0], [0.3, 0.2, 0.5]]
    picture.show({"step": 1200, "temperature": 0.25, "pi": pi})
    np.testing.assert_allclose(picture.image.get_array(), np.array(pi).T)  # operations as rows, blocks as columns
    shown = [(text.get_position(), text.get_text()) for text in picture.numbers]
    assert shown == [((0, 1), ".90"), ((1, 0), "1.00"), ((2, 2), ".50")]
    title = picture.title.get_text()
    assert "1,200" in title and "temperature 0.250" in title and "entropy 0.47" in title
    pixels = picture.pixels()
    x, y = (int(v) for v in picture.image.axes.transData.transform((1.35, 0.35)))  # in a cell, beside its number
    assert pixels[pixels.shape[0] - y, x] == 0
    x, y = (int(v) for v in picture.image.axes.transData.transform((1.35, 1.35)))
    assert pixels[pixels.shape[0] - y, x] == 255


def test_the_animation_pauses_on_its_last_frame_and_loops(tmp_path):
    path = tmp_path / "pi.gif"
    assert pi_figures.animate(history(12), path) == 12
    frames = imageio.imread(path)
    assert len(frames) == 12
    durations = [imageio.immeta(path, index=i)["duration"] for i in range(12)]
    assert durations == [pi_figures.FRAME_MS] * 11 + [pi_figures.LAST_FRAME_MS]
    assert imageio.immeta(path)["loop"] == 0
    assert len(np.unique(frames)) <= pi_figures.GREY_LEVELS


def test_an_animation_needs_two_steps(tmp_path):
    with pytest.raises(ValueError, match="at least two"):
        pi_figures.animate(history(1), tmp_path / "pi.gif")


@pytest.mark.parametrize("blocks", [1, 6, 32])
def test_still_figures_are_drawn(tmp_path, blocks):
    lines = history(4, blocks)
    metrics = [{"step": s, "tokens": s * 100, "split": "train", "nll": 5 / s} for s in range(1, 9)]
    metrics.append({"step": 8, "tokens": 800, "split": "valid", "nll": 1.0})
    pi_figures.final_pi(lines, tmp_path / "pi.png")
    pi_figures.pi_over_time(lines, tmp_path / "time.png")
    pi_figures.entropy_over_time(lines, tmp_path / "entropy.png")
    curves.learning_curves(metrics, tmp_path / "curves.png")
    pi_figures.pattern_strip(["attention", "dense", "identity"] * blocks, tmp_path / "strip.png")
    for path in tmp_path.iterdir():
        assert imageio.imread(path).std() > 1  # the picture is not blank


def test_every_operation_has_a_colour():
    from nas.core.pattern import OPERATIONS

    assert set(OPERATIONS) == COLOURS.keys()
    assert len(set(COLOURS.values())) == len(OPERATIONS)
