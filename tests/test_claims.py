"""The results of a comparison, its claims, tables and figure."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml

from nas.comparison.claims import make_claims, training_warning, verdict_of
from nas.comparison.results import PatternResult, choose_metric, read_results
from nas.comparison.spec import Contender
from nas.comparison.statistics import dominating, t_test
from nas.core.errors import InputError
from nas.core.pattern import expand
from nas.reporting import comparison_figures
from nas.reporting.comparison_report import csv_text, table


def results(perplexity: float, comparable: bool = True, ms: float = 10.0) -> dict:
    """The content of results.yaml for a text of 1,000 tokens, 500 words and 2,500 bytes."""
    nll = 500 * math.log(perplexity)
    split = {
        "nll_per_token": nll / 1000,
        "perplexity": math.exp(nll / 1000),
        "word_perplexity": perplexity,
        "word_perplexity_comparable": comparable,
        "bits_per_byte": nll / math.log(2) / 2500,
    }
    about = {"parameters": 100, "flops_per_token": 1000.0, "wall_time_s": 7200.0}
    latency = {"median_ms": ms, "ratio_to_interleaved": ms / 20}
    return {"valid": split | {"word_perplexity": perplexity + 5}, "test": split, **about, "latency": latency}


def row(name, kind, letters, perplexities, **about) -> PatternResult:
    found = [results(perplexity, **about) for perplexity in perplexities]
    hours = 3.0 if kind == "searched" else 0.0
    return PatternResult(Contender(name, kind, expand(letters)), found, found[0]["latency"], hours, 77)


def random_rows(*perplexities, **about) -> list[PatternResult]:
    """A random pattern for each list of perplexities, one for each seed."""
    return [row(f"random-{n}", "random", "aaiiid", p, **about) for n, p in enumerate(perplexities, start=1)]


INTERLEAVED = row("interleaved-6", "given", "adadad", [101.0, 103.0, 102.0], ms=20.0)  # known by its blocks
SEARCHED = row("searched", "searched", "addidd", [98.0, 100.0, 99.0])
RANDOM = random_rows((103.0, 104.0), (105.0, 106.0), (104.0, 105.0))
QUALITY, RANDOM_CLAIM = "better word perplexity than interleaved", "better than the average random pattern"


def claims_of(rows, name="searched") -> dict[str, dict]:
    return {claim["claim"]: claim for claim in make_claims(rows) if claim["pattern"] == name}


def test_welch_against_its_formula():
    """Welch 1947: t, its degrees of freedom and p, with the t distribution integrated numerically."""
    one, two = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 6.5, 8.0])
    parts = [sample.var(ddof=1) / len(sample) for sample in (one, two)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(s) - 1) for part, s in zip(parts, (one, two), strict=True))
    t = (one.mean() - two.mean()) / math.sqrt(sum(parts))
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    grid = np.linspace(-4000, t, 4_000_001)
    below = np.trapezoid(scale * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2), grid)
    result = t_test(one, two)
    assert result["loss_difference"] == pytest.approx(one.mean() - two.mean())
    assert result["p"] == pytest.approx(2 * below, rel=1e-3)
    low, high = result["interval"]
    assert low + high == pytest.approx(2 * result["loss_difference"]) and low < high


def test_the_verdict_needs_p_below_5_percent():
    for difference, p, verdict in ((-1, 0.049, "yes"), (1, 0.049, "no"), (-1, 0.051, "not shown")):
        assert verdict_of({"loss_difference": difference, "p": p}) == verdict
    assert t_test(np.array([1.0, 1.0]), np.array([2.0, 2.0]))["p"] is None  # nothing varies
    claim = claims_of([INTERLEAVED, row("searched", "searched", "ad", [99.0])])[QUALITY]
    assert claim["verdict"] == "not shown" and claim["sentence"].endswith("by mean loss, not tested.")


def test_claims_where_the_search_wins():
    claims = claims_of([INTERLEAVED, SEARCHED, *RANDOM])
    quality = claims[QUALITY]
    assert quality["verdict"] == "yes" and quality["figures"]["searched"] == pytest.approx(99.0)
    assert "99.0 ± 0.6 on test, interleaved 102.0 ± 0.6 (3 and 3 seeds): -2.9% by mean loss" in quality["sentence"]
    difference = np.log([99.0, 100.0, 98.0]).mean() - np.log([101.0, 103.0, 102.0]).mean()
    assert quality["figures"]["loss_difference"] == pytest.approx(difference)
    latency = claims["less latency than interleaved"]
    assert latency["verdict"] == "yes" and latency["figures"]["ratio"] == 0.5
    assert "takes 10.00 ms, 0.50 of the interleaved pattern's latency" in latency["sentence"]
    random = claims[RANDOM_CLAIM]["figures"]
    assert claims[RANDOM_CLAIM]["verdict"] == "yes" and random["better_than"] == 3 and random["p"] < 0.01
    assert random["random_means"] == [103.5, 105.5, 104.5] and random["latency_to_searched"] == [1.0, 1.0, 1.0]
    assert claims["on the Pareto front in the mean"]["verdict"] == "yes"


def test_claims_where_the_search_loses():
    lost = row("searched", "searched", "aaaadd", [110.0, 111.0, 112.0], ms=30.0)
    claims = claims_of([INTERLEAVED, lost, *RANDOM])
    assert {claim["verdict"] for claim in claims.values()} == {"no"} and len(claims) == 4
    dominated_by = claims["on the Pareto front in the mean"]["figures"]["dominated_by"]
    assert dominated_by == ["interleaved-6", "random-1", "random-2", "random-3"]
    assert "random patterns at 0.33 to 0.33 times its latency" in claims[RANDOM_CLAIM]["sentence"]


@pytest.mark.parametrize(
    ("perplexities", "verdict", "better_than"),
    [
        ([99.5, 99.6, 99.7, 60.0], "not shown", 3),  # better than most, but not than the average
        ([60.0, 61.0, 62.0], "no", 0),
        ([99.5], "not shown", 1),
    ],
)
def test_a_random_pattern_counts_once_for_any_number_of_its_seeds(perplexities, verdict, better_than):
    expected = t_test(np.log([98.0, 100.0, 99.0]), np.log(perplexities))
    first, *others = perplexities
    claim = claims_of([SEARCHED, *random_rows([first] * 4, *([other] for other in others))])[RANDOM_CLAIM]
    assert claim["figures"]["p"] == pytest.approx(expected["p"])
    assert (claim["verdict"], claim["figures"]["better_than"]) == (verdict, better_than)


def test_a_searched_pattern_is_compared_with_its_own_random_patterns():
    kinds = {"searched-0.4": "diiiid", "searched-0.5": "adiiid", "searched-1": "aadidd"}
    rows = [row(name, "searched", letters, [97.0, 98.0, 96.0]) for name, letters in kinds.items()]
    rows += [row(f"random-1-{n}", "random", "aad", [p, p + 1]) for n, p in enumerate([90.0, 91.0, 92.0])]
    rows += [row(f"random-0.5-{n}", "random", "da", [p, p + 1]) for n, p in enumerate([103.0, 104.0])]
    assert claims_of(rows, "searched-0.5")[RANDOM_CLAIM]["figures"]["random_means"] == [103.5, 104.5]
    assert claims_of(rows, "searched-1")[RANDOM_CLAIM]["figures"]["random_means"] == [90.5, 91.5, 92.5]
    assert RANDOM_CLAIM not in claims_of(rows, "searched-0.4") and QUALITY not in claims_of(rows, "searched-0.4")


def test_hardly_trained_patterns_are_named():
    """The perplexity per token on valid is sqrt(word perplexity), here 10 and 9.9: above a quarter of 39, not of 40."""
    rows = [row("one", "given", "ad", [100.0, 100.0]), row("two", "given", "dd", [98.0, 98.0])]

    def warning(vocab_size):
        return training_warning([replace(result, vocab_size=vocab_size) for result in rows])

    assert warning(41) is None
    assert warning(39.8).startswith("WARNING: hardly trained: one. The perplexity per token")
    assert warning(39).startswith("WARNING: hardly trained: one, two. ") and "quarter of the 39 tokens" in warning(39)


def test_faster_or_better_patterns_dominate_and_equal_ones_do_not():
    for perplexity, ms, dominates in ((99.0, 10.0, False), (99.0, 9.0, True), (90.0, 10.0, True), (90.0, 10.1, False)):
        own, other = row("own", "searched", "a", [99.0]), row("other", "given", "d", [perplexity], ms=ms)
        assert (dominating(own, [own, other], choose_metric([own])) == [other]) == dominates


def test_one_run_without_comparable_words_makes_the_metric_bits_per_byte():
    rows = [row("interleaved", "given", "adad", [100.0, 101.0])]
    rows.append(row("searched", "searched", "addd", [99.0, 98.0], comparable=False))
    claim = claims_of(rows)["better bits per byte than interleaved"]
    bits = [np.mean([500 * math.log(p) / math.log(2) / 2500 for p in pair]) for pair in ((99, 98), (100, 101))]
    assert claim["figures"]["searched"] == pytest.approx(bits[0])
    assert claim["figures"]["loss_difference"] == pytest.approx((bits[0] - bits[1]) * math.log(2))
    assert f"{bits[0] - bits[1]:+.4f}" in claim["sentence"]
    assert "bits per byte, test" in table(rows)[0]
    assert table([SEARCHED])[1][0][2:7] == ["99.0 ± 0.6", "104.0 ± 0.6", "3", "10.00", "0.500"]  # test, then valid
    _, content = csv.DictReader(io.StringIO(csv_text(rows)))
    assert content["word_perplexity_mean"] == "" and float(content["nll_mean"]) > 0


def test_results_are_read_from_patterns_runs_and_latencies_best_first(tmp_path):
    for folder in ("patterns", "search-1"):
        (tmp_path / folder).mkdir()
    (tmp_path / "provenance.yaml").write_text("vocab_size: 77\n")
    (tmp_path / "search-1" / "outcome.yaml").write_text("wall_time_s: 7200\n")
    (tmp_path / "latencies.yaml").write_text(yaml.safe_dump({"patterns": {"addidd": {"median_ms": 1.0}}}))
    origins = {"interleaved": {"method": "given"}, "random-1": {"method": "random"}, "searched": {"runs": ["search-1"]}}
    letters = {"interleaved": "adadad", "random-1": "addidd", "searched": "addidd", "missing": "d"}
    for name, blocks in letters.items():
        content = {"format": "par-pattern/2", "blocks": expand(blocks), "derived_from": origins.get(name, {})}
        (tmp_path / "patterns" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="none of its runs has finished"):
        read_results(tmp_path)
    for name, perplexity in (("addidd-1", 99.0), ("addidd-2", 100.0), ("adadad-2", 102.0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "results.yaml").write_text(yaml.safe_dump(results(perplexity)))
    random, searched, baseline = read_results(tmp_path)
    assert baseline.contender == Contender("interleaved", "given", expand("adadad")) and baseline.vocab_size == 77
    assert (random.contender.kind, searched.contender.kind) == ("random", "searched")
    assert [run["test"]["word_perplexity"] for run in searched.runs] == [99.0, 100.0]
    assert (searched.search_hours, baseline.search_hours, random.search_hours) == (2.0, 0.0, 0.0)
    assert searched.latency == {"median_ms": 1.0} and baseline.latency["ratio_to_interleaved"] == 0.5  # its training's


def test_the_plot_names_outliers_and_draws_the_front(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(comparison_figures, "save", lambda figure, path: figures.append(figure))
    outlier, same = row("dense-only", "given", "d", [900.0], ms=5.0), replace(SEARCHED.contender, name="searched-2")
    rows = [INTERLEAVED, SEARCHED, replace(SEARCHED, contender=same), *RANDOM, outlier]
    comparison_figures.comparison_plot(rows, tmp_path / "plot.png")
    axes = figures[0].axes[0]
    assert axes.get_title(loc="left") == "outside: dense-only 900.0" and axes.get_ylim()[1] < 150
    assert [text.get_text() for text in axes.texts] == ["searched, searched-2", "interleaved-6"]
    (front,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert set(front.get_xdata()) == {0.5}  # the outlier is faster, but outside; interleaved is dominated
