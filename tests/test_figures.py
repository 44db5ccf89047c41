import imageio.v3 as imageio
import numpy as np
import pytest
from matplotlib.text import Text

from models.operations.registry import OPERATIONS
from nas.comparison.results import NetworkResult
from nas.core.pattern import expand
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
    pixels = picture.pixels()
    assert colour_at(picture, pixels, 1.35, 0.35) == (0, 0, 0)  # in a cell, beside its number
    assert colour_at(picture, pixels, 1.35, 1.3) == (255, 255, 255)


def colour_at(picture, pixels, block, operation):
    x, y = (int(v) for v in picture.image.axes.transData.transform((block, operation)))
    return tuple(pixels[pixels.shape[0] - y, x].tolist())


def test_frames_say_what_trains_and_outline_what_argmax_chooses():
    """A search with 20 steps of the weights alone, of which the history has the last line, and one by trials."""
    about = {"operations": NAMES, "of_steps": 1000, "expected_latency_ms": None}
    pi = [[1 / 3] * 3] * 2, [[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]], [[0.1, 0.1, 0.8], [1.0, 0.0, 0.0]]
    gumbel, trials = [], []
    for place, (step, temperature) in enumerate([(20, 1.0), (500, 0.614), (1000, 0.1)]):
        line = about | {"step": step, "pi": pi[place], "expected_cost_ratio": 0.9 - place / 10}
        gumbel.append(line | {"temperature": temperature})
        trials.append(line | {"temperature": 1.0, "trials": place})
    pad, trained = figures.FIGURE_SPACE, "weights and architecture train"
    described = {  # by a word of the legend: the lines, whose cost is that in the titles, and the titles
        "argmax": (gumbel, "FLOPs", "interleaved's"),
        "best network": (trials, "cost", "the reference's"),
        "most probable operation": ([gumbel[0]], "cost", "the reference's"),  # by which method is not known
    }
    titles = {
        "argmax": [
            f"step {3 * pad}20 of 1,000  ·  only the weights train  ·  temperature 1.00",
            f"step {2 * pad}500 of 1,000  ·  {trained}  ·  temperature 0.61",
            f"step 1,000 of 1,000  ·  {trained}  ·  temperature 0.10",
        ],
        "best network": [
            "before the first trial",
            "after 1 of 2 trials  ·  500 training steps",
            "after 2 of 2 trials  ·  1,000 training steps",
        ],
        "most probable operation": [f"step {3 * pad}20 of 1,000"],
    }
    for legend, (lines, cost, whose) in described.items():
        picture = figures.PiPicture(lines)
        assert legend in picture.figure.get_supxlabel()
        for place, (line, title) in enumerate(zip(lines, titles[legend], strict=True)):
            picture.show(line)
            pixels = picture.pixels()
            assert picture.title.get_text() == f"{title}\nexpected {cost}: {90 - 10 * place}% of {whose}"
            boxes = [text.get_window_extent() for text in (picture.title, picture.figure._supxlabel)]
            assert all(box.x0 >= 0 and box.x1 <= picture.figure.bbox.x1 for box in boxes)
            outlined = [outline.get_y() + 0.45 for outline in picture.outlines if outline.get_visible()]
            assert outlined == ([] if place == 0 else np.argmax(line["pi"], axis=1).tolist())
            edges = {colour_at(picture, pixels, block + 0.45, row - 0.2) for block, row in enumerate(outlined)}
            assert edges == ({(195, 90, 60)} if outlined else set()), "red"


def test_no_number_is_written_where_all_operations_tie():
    line = {"step": 0, "temperature": 1.0, "operations": NAMES, "pi": [[1 / 3] * 3, [0.4, 0.4, 0.2]]}
    picture = figures.PiPicture([line])
    picture.show(line)
    assert [text.get_text() for text in picture.numbers] == ["", ".40"]
    assert picture.title.get_text() == "step 0 of 0"


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
    assert durations == [figures.FIRST_FRAME_MS, *[figures.FRAME_MS] * 10, figures.LAST_FRAME_MS]
    assert imageio.immeta(path)["loop"] == 0 and len(np.unique(frames)) <= figures.LEVELS
    assert [195, 90, 60] in frames[-1].reshape(-1, 3).tolist(), "the red of outlines"


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
    choice["trials"] = [
        sizes | {"name": name, "blocks": [name], "bits_per_byte": 1.2} for name in ("attention", "conv")
    ]
    figures.networks_figure(choice, trained, tmp_path / "figure.svg")
    (axes,) = saved_figures[0].axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    worst = 1.2 * 1.15
    drawn = [float(y) for collection in axes.collections for _, y in collection.get_offsets()]
    assert any(y == pytest.approx(worst) for y in drawn) and low < worst < high
    assert all(left < cost < right and low < bits < high for _, cost, bits in trained)
    assert left < min(0.8, 1.2) and right > 1.5
    assert high < max(drawn), "the network without a trial is far away"


def texts_of(axis) -> list:
    """The labels of the ticks within the limits of an axis."""
    low, high = axis.get_view_interval()
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    return [label for place, label in ticks if low <= place <= high]


def check_legible(figure, values) -> None:
    """All values are on the y axis. Three to seven ticks have different labels. No text hides another or is cut off."""
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    assert low < min(values) and max(values) < high and figure.get_size_inches()[0] <= 5
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    ticks = [texts_of(axes.xaxis), texts_of(axes.yaxis)]
    assert not axes.xaxis.get_offset_text().get_text() and not axes.yaxis.get_offset_text().get_text()
    for labels in ticks:
        assert 3 <= len({label.get_text() for label in labels}) == len(labels) <= 7
        assert all(0 < len(label.get_text()) <= 7 for label in labels)
    shown = [*ticks[0], *ticks[1], *axes.texts, *legends, axes.xaxis.label, axes.yaxis.label]
    boxes = [Text.get_window_extent(text) for text in shown]
    for one, box in enumerate(boxes):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        hidden = [shown[one].get_text() for other in boxes[:one] if box.overlaps(other)]
        assert not hidden


QUALITIES = {
    "equal": [1.59] * 6,
    "close": [1.59, 1.592, 1.5941, 1.5952, 1.597, 1.6],
    "wide": [1.1, 1.2, 1.3, 1.5, 2.0, 3.3],
    "words": [20_000, 25_000, 41_000, 47_000, 60_000, 70_000],
}


@pytest.mark.parametrize("values", QUALITIES.values(), ids=QUALITIES)
@pytest.mark.parametrize("cost", [0.05, 3.0, 2.5e8])
def test_pictures_of_networks_are_legible(values, cost, tmp_path, saved_figures):
    networks, rows = [], []
    for number, value in enumerate(values):
        own = {"vocab_size": 1000 * 2**number, "d_model": 64, "blocks": expand("a d8x c w32h2 d i " * 4)}
        about = {"name": f"n{number}", "cost": cost * (1 + number / 10), "behind": value / values[0] - 1}
        networks.append(own | about | {"interval": 0.5, "bits_per_byte": value})
    key = {key: networks[0][key] for key in ("vocab_size", "d_model", "blocks")}
    choice = {"network": key, "reference": key, "networks": networks, "trials": networks, "budget": 1.2}
    choice |= {"reference_cost": cost, "unit": "ms for 1,000 bytes of text"}
    figures.networks_figure(choice, [], tmp_path / "figure.svg")
    check_legible(saved_figures[-1], values)
    for number, value in enumerate(values):
        metrics = {"bits_per_byte": value, "word_perplexity": value, "word_perplexity_comparable": value > 100}
        run = {"valid": metrics, "test": metrics}
        rows.append(NetworkResult(f"8000-{number}-aad", str(number), [run], cost * (1 + number / 10), 1.0, 8000))
    if cost < 100:
        figures.comparison_plot(rows, tmp_path / "plot.svg")
        check_legible(saved_figures[-1], values[:-1])  # the last one may be far away


def test_the_gains_are_bars_of_bits_per_byte(tmp_path, saved_figures):
    def test(bits):
        return {"test": {"bits_per_byte": bits}}

    parts = {"parts": ["network", "states", "cache", "counts"], "test_without_counts": test(2.2)["test"]}
    found = test(1.4) | {"network": test(2.8), "mixture": parts}
    for counted, bars in ((test(1.5), [1.5, 2.8, 2.2, 1.4]), (None, [2.8, 2.2, 1.4])):
        figures.gains_figure(found, counted, tmp_path / "gains.svg")
        (axes,) = saved_figures[-1].axes
        assert [bar.get_width() for bar in axes.patches] == bars
        assert [text.get_text() for text in axes.texts] == [f"{bits:.4f}" for bits in bars]
