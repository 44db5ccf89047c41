import numpy as np
import pytest

from nas.data.optimal_cutoffs import LayerCost, optimal_cutoffs, total_cost
from tests import reference
from tests.processes import refuse, succeed

COSTS = [LayerCost(), LayerCost(div_value=4), LayerCost(per_product=0.0, per_row=0.0)]


def descending(values) -> np.ndarray:
    return np.sort(np.asarray(values, dtype=np.float64))[::-1]


def adversarial(words: int) -> dict[str, np.ndarray]:
    """Difficult counts: ties, plateaus, jumps, and weights of all sizes."""
    rank = np.arange(1, words + 1)
    return {
        "all equal": np.ones(words),
        "never seen": np.zeros(words),
        "one word": descending([1e9] + [0] * (words - 1)),
        "one giant": descending([1e9] + [1] * (words - 1)),
        "zipf": np.floor(1e6 / rank),
        "geometric": np.floor(2.0 ** (40 - rank * 40 / words)),
        "linear": (words - rank + 1).astype(float),
        "plateaus": np.repeat(descending([10**k for k in range(8)]), -(-words // 8))[:words],
        "half unseen": np.where(rank <= words // 2, 7.0, 0.0),
    }


@pytest.mark.parametrize("cost", COSTS, ids=["layer", "layer-div-value", "layer-no-floor"])
@pytest.mark.parametrize("words", [5, 64, 199, 200])
def test_divide_and_conquer_finds_what_brute_force_finds(words, cost):
    source = np.random.default_rng(words)
    random = {
        "random": descending(source.integers(0, 1000, words)),
        "few values": descending(source.integers(0, 3, words)),
        "heavy": descending(np.floor(source.pareto(0.3, words))),
    }
    for name, counts in {**random, **adversarial(words)}.items():
        for clusters in (1, 2, 3, 5):
            result = optimal_cutoffs(counts, clusters, cost)
            assert [0, *result, words] == sorted({0, *result, words}), name
            least = reference.cheapest_cutoffs(counts, clusters, cost)
            assert total_cost(counts, result, cost) == pytest.approx(least, rel=1e-12), name


def test_the_work_grows_as_n_log_n():
    class Counting(LayerCost):
        tried = 0

        def tail(self, index, size, share):
            Counting.tried += np.size(size)
            return super().tail(index, size, share)

    words, clusters = 4096, 4
    optimal_cutoffs(np.floor(1e6 / np.arange(1, words + 1)), clusters, Counting())
    assert Counting.tried < (clusters - 1) * words * (np.log2(words) + 1)


def test_the_layer_cost_charges_head_tails_projections_and_products():
    cost = LayerCost(d_model=8, div_value=2, tokens=10, per_multiply_add=1, per_logit=3, per_row=5, per_product=70)
    counts = np.array([6.0, 2.0, 1.0, 1.0])
    head = (1 + 2) * (8 + 3) + 7  # every token computes one word and an entry per tail
    first = 0.2 * (1 * (4 + 3) + 5 + 8 * 4) + 14  # two products: onto width 4, and onto the logits
    second = 0.2 * (2 * (2 + 3) + 5 + 8 * 2) + 14
    assert total_cost(counts, [1, 2], cost) == pytest.approx(head + first + second)


def test_fewer_words_than_clusters_are_refused():
    with pytest.raises(ValueError, match="3 clusters need at least 3 words, got 2"):
        optimal_cutoffs(np.array([2.0, 1.0]), 3, LayerCost())


@pytest.mark.slow
def test_the_command_takes_counts_in_any_order(tmp_path):
    counts = np.floor(1e6 / np.arange(1, 301)).astype(int)
    path = tmp_path / "counts.txt"
    path.write_text("\n".join(map(str, np.random.default_rng(0).permutation(counts))))
    model = LayerCost(64, 2, 512)
    expected = optimal_cutoffs(descending(counts), 4, model)
    sizes = ["--d-model", 64, "--div-value", 2, "--tokens", 512]
    words, costs, cutoffs = succeed("cutoffs", path, "--clusters", 4, *sizes).splitlines()
    assert words.startswith(f"300 words, {counts.sum():,} counted; found in ")
    least, uncut = (total_cost(descending(counts), chosen, model) for chosen in (expected, []))
    assert f": {least:,.1f}; uncut {uncut:,.1f}" in costs and cutoffs == f"cutoffs: {expected}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\n3\n-2\n", "line 3 is '-2': a count is a whole number, 0 or more"),
        ("5\n\n2\n\n", "line 2 is '': a count is a whole number"),
        ("5\n1_000\n2\n", "line 2 is '1_000': a count is a whole number"),
        (f"5\n{10**400}\n2\n", "line 2 is '1000"),
        ("0\n0\n0\n", "holds no count above 0"),
        ("5\n2\n", "ends at line 2: 3 clusters need at least 3 counts"),
    ],
)
def test_bad_counts_are_reported_with_their_line(tmp_path, text, message):
    path = tmp_path / "counts.txt"
    path.write_text(text)
    line = refuse("cutoffs", path, "--clusters", 3)
    assert line.startswith(f"error: {path}") and message in line
