import imageio.v3 as imageio
import numpy as np
import pytest

from models.operations.registry import OPERATIONS
from nas.reporting import figures

NAMES = ["attention", "dense", "identity"]


def history(steps, blocks=6):
    source = np.random.default_rng(0)
    logits = np.cumsum(source.normal(0, 0.2, (steps, blocks, 3)), axis=0)
    pi = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return [
        {"step": 10 * t, "temperature": 1 / (t + 1), "operations": NAMES, "pi": pi[t].tolist()} for t in range(steps)
    ]


def test_the_front_leaves_out_points_that_another_one_reaches_in_both_coordinates():
    points = [(10.0, 99.0), (9.0, 99.0), (10.0, 90.0), (10.1, 90.0), (8.0, 120.0)]
    assert figures.front(points) == [(8, 120), (9, 99), (10, 90)]
    assert figures.front([(1.0, 2.0), (1.0, 2.0)]) == [(1.0, 2.0)]


def test_frames_are_spread_and_include_both_ends():
    many = figures.choose_frames(1000)
    assert len(many) == figures.MAX_FRAMES and many[0] == 0 and many[-1] == 999 and max(np.diff(many)) <= 7


def test_darkness_is_probability_which_is_written_on_the_likeliest_operation():
    pi = [[0.05, 0.9, 0.05], [1.0, 0.0, 0.0], [0.3, 0.2, 0.5]]
    lines = [{"step": 1200, "temperature": heat, "operations": NAMES, "pi": pi} for heat in (1.0, 0.25)]
    picture = figures.PiPicture(lines)
    picture.show(lines[1])
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


def test_no_number_is_written_where_all_operations_tie_and_the_title_is_not_cut():
    line = {"step": 0, "temperature": 1.0, "operations": NAMES, "pi": [[1 / 3] * 3, [0.4, 0.4, 0.2]]}
    picture = figures.PiPicture([line])
    picture.show(line)
    assert [text.get_text() for text in picture.numbers] == ["", ".40"]
    picture.pixels()
    box = picture.title.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= picture.figure.bbox.x1 and "temperature" not in picture.title.get_text()


def pi_lines(*entries):
    """Lines of pi.jsonl for one block, from (step, probability of attention)."""
    return [
        {"step": n, "temperature": 1.0, "operations": ["attention", "dense"], "pi": [[p, 1 - p]]} for n, p in entries
    ]


def drawn(lines):
    return [(line["step"], line["pi"][0][0]) for line in figures.pi_history(lines)]


def test_steps_before_pi_changes_are_one_frame():
    assert drawn(pi_lines((0, 0.5), (50, 0.5), (100, 0.5), (150, 0.6))) == [(100, 0.5), (150, 0.6)]
    assert drawn(pi_lines((0, 0.5), (50, 0.5))) == [(50, 0.5)]


def test_pi_over_time_gives_most_of_its_width_to_the_changes(tmp_path, saved_figures):
    lines = pi_lines((0, 0.5), (1000, 0.5), *((1000 + k, 0.5 + k / 100) for k in range(1, 21)))
    figures.pi_over_time(figures.pi_history(lines), tmp_path / "time.png")
    (axes,), (grey,) = saved_figures[0].axes, saved_figures[0].axes[0].patches
    left, right = axes.get_xlim()
    assert right == 1020 and 970 < left < 1000
    assert (grey.get_x(), grey.get_x() + grey.get_width()) == (left, 1000)
    assert "1,000 steps" in saved_figures[0].get_supxlabel()


def test_learning_curves_show_each_split_and_cut_only_first_steps(tmp_path, saved_figures):
    metrics = [{"tokens": s, "split": "train", "nll": nll} for s, nll in enumerate([90.0, 9.0, 4.0, 3.0, 7.5, 2.0])]
    figures.learning_curves(metrics, tmp_path / "curves.png")
    metrics += [{"tokens": 6 + s, "split": "valid", "nll": nll} for s, nll in enumerate([2.0, 1.5])]
    figures.learning_curves(metrics[2:], tmp_path / "curves.png")
    (cut,), (whole,) = (figure.axes for figure in saved_figures)
    assert 9.0 < cut.get_ylim()[1] < 90 and cut.get_title(loc="left") == "first steps outside"
    low, high = whole.get_ylim()
    assert low < 1.5 and high > 7.5 and whole.get_title(loc="left") == ""
    assert [text.get_text() for text in whole.get_legend().get_texts()] == ["train", "valid"]
    assert len({line.get_color() for line in whole.lines}) == 2


def test_the_animation_pauses_on_its_last_frame_and_loops(tmp_path):
    path = tmp_path / "pi.gif"
    count, frames = figures.animate(history(12), path), imageio.imread(path)
    assert count == len(frames) == 12
    durations = [imageio.immeta(path, index=i)["duration"] for i in range(12)]
    assert durations == [figures.FRAME_MS] * 11 + [figures.LAST_FRAME_MS]
    assert imageio.immeta(path)["loop"] == 0 and len(np.unique(frames)) <= figures.GREY_LEVELS


@pytest.mark.parametrize("blocks", [1, 32])
def test_still_figures_are_drawn_with_a_colour_for_each_operation(tmp_path, blocks):
    lines = history(4, blocks)
    metrics = [{"tokens": 100, "split": split, "nll": 5.0} for split in ("train", "train", "valid")]
    for draw in (figures.final_pi, figures.pi_over_time):
        draw(lines, tmp_path / f"{draw.__name__}.png")
    figures.learning_curves(metrics, tmp_path / "curves.png")
    figures.pattern_strip(["attention", "window 32 heads=2", "identity"] * blocks, tmp_path / "strip.png")
    for path in tmp_path.iterdir():
        assert imageio.imread(path).std() > 1  # the picture is not blank
    blocks = [*OPERATIONS, "dense 2x", "dense 8x", "dense", "dense 2x"]
    colours = figures.colours_of(blocks)
    assert colours.keys() == set(blocks) and len(set(colours.values())) == len(colours)
    assert colours == figures.colours_of(blocks[::-1])


@pytest.mark.parametrize(
    "trained", [[], [("found: a", 1.0, 1.2), ("usual: ad", 2.2, 1.3)]], ids=["search", "trainings"]
)
def test_the_figure_of_networks_shows_all_trials_the_budget_and_all_trainings(trained, tmp_path, saved_figures):
    """The reference is hardly worse than the chosen network, and one trial is much worse."""
    networks, sizes = [], {"vocab_size": 2000, "d_model": 64}
    given = ("attention", 1.0, 0.0), ("dense", 1.5, 0.001), ("conv", 0.8, 0.15), ("window", 1.2, 0.9)
    for name, cost, behind in given:
        networks.append(sizes | {"name": name, "blocks": [name], "cost": cost, "behind": behind, "interval": 0})
    shown = {"network": sizes | {"blocks": ["attention"]}, "reference": sizes | {"blocks": ["dense"]}}
    choice = shown | {"networks": networks, "budget": 0.8, "reference_cost": 1.5, "unit": "ms"}
    choice["trials"] = [{"name": name} for name in ("attention", "conv")]
    figures.networks_figure(choice, trained, tmp_path / "figure.svg")
    (axes,) = saved_figures[0].axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    worst = 1.2 * 1.15 if trained else 15
    drawn = [float(y) for collection in axes.collections for _, y in collection.get_offsets()]
    assert any(y == pytest.approx(worst) for y in drawn) and low < worst < high
    assert all(left < cost < right and low < bits < high for _, cost, bits in trained)
    assert left < min(0.8, 1.2) and right > 1.5
    assert high < max(drawn), "the network without a trial is far away"
