import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml

from nas.comparison.claims import make_claims, training_warning, verdict_of
from nas.comparison.results import (
    PatternResult,
    choose_metric,
    known_latencies,
    mean_and_standard_error,
    read_results,
    write_contenders,
)
from nas.comparison.spec import Contender, Settings
from nas.comparison.statistics import chance_of_better_draw, dominating, t_test
from nas.core.errors import InputError
from nas.core.pattern import expand
from nas.reporting.comparison_report import csv_text, markdown


def results(perplexity: float, comparable: bool = True, parameters: int = 100, hours: float = 2.0) -> dict:
    """The content of results.yaml for a text of 1,000 tokens, 500 words and 2,500 bytes."""
    nll = 500 * math.log(perplexity)
    split = {
        "nll": nll,
        "tokens": 1000,
        "nll_per_token": nll / 1000,
        "perplexity": math.exp(nll / 1000),
        "word_perplexity": perplexity,
        "word_perplexity_comparable": comparable,
        "bits_per_byte": nll / math.log(2) / 2500,
    }
    valid = split | {"word_perplexity": perplexity + 5}
    about = {"parameters": parameters, "flops_per_token": 10.0 * parameters, "wall_time_s": 3600 * hours}
    return {"valid": valid, "test": split, **about}


def row(name, kind, letters, perplexities, ms=10.0, baseline_ms=20.0, **about) -> PatternResult:
    latency = None if ms is None else {"median_ms": ms, "ratio_to_interleaved": ms / baseline_ms}
    found = [results(perplexity, **about) for perplexity in perplexities]
    hours = 3.0 if kind == "searched" else 0.0
    return PatternResult(Contender(name, kind, expand(letters)), list(range(1, len(found) + 1)), found, latency, hours)


INTERLEAVED = row("interleaved", "given", "adadad", [100.0, 102.0, 101.0], ms=20.0)
SEARCHED = row("searched", "searched", "addidd", [98.0, 100.0, 99.0])

QUALITY = "better word perplexity than interleaved"
BETTER_THAN_RANDOM = "better than the average random pattern at the same latency"


def random_rows(*perplexities, **about) -> list[PatternResult]:
    """A random pattern for each list of perplexities, one for each seed."""
    return [row(f"random-{n}", "random", "aaiiid", list(p), **about) for n, p in enumerate(perplexities, start=1)]


def claims_of(rows, name="searched") -> dict[str, dict]:
    return {claim["claim"]: claim for claim in make_claims(rows) if claim["pattern"] == name}


RANDOM = random_rows((103.0, 104.0), (105.0, 106.0), (104.0, 105.0))


def test_mean_and_standard_error_by_hand():
    assert mean_and_standard_error([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3)))
    assert mean_and_standard_error([4.0]) == (4.0, None)


def test_welch_against_its_formula():
    """Welch 1947: t, its degrees of freedom and p, with the t distribution integrated numerically."""
    one, two = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 6.5, 8.0])
    parts = [sample.var(ddof=1) / len(sample) for sample in (one, two)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(s) - 1) for part, s in zip(parts, (one, two), strict=True))
    t = (one.mean() - two.mean()) / error
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    grid = np.linspace(-4000, t, 4_000_001)
    below = np.trapezoid(scale * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2), grid)
    result = t_test(one, two, paired=False)
    assert result["difference"] == pytest.approx(one.mean() - two.mean())
    assert result["p"] == pytest.approx(2 * below, rel=1e-3)
    assert result["low"] + result["high"] == pytest.approx(2 * result["difference"]) and result["low"] < result["high"]


def test_paired_t_test_against_its_formula():
    """t of the mean difference over its standard error; with 2 degrees of freedom p has a closed form."""
    one, two = np.array([5.0, 7.0, 6.1]), np.array([4.0, 5.5, 5.2])
    differences = one - two
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(3))
    result = t_test(one, two, paired=True)
    assert result["p"] == pytest.approx(1 - t / math.sqrt(t * t + 2))
    half = 4.30265 * differences.std(ddof=1) / math.sqrt(3)  # the quantile of 97.5%
    assert result["high"] - result["difference"] == pytest.approx(half, rel=1e-5)


def test_the_effect_of_a_seed_on_all_patterns_is_not_noise():
    """Patterns differ by the same amount in every seed, and seeds differ much more. Only the paired test shows it."""
    baseline = row("interleaved", "given", "adadad", [100.0, 150.0, 225.0])
    searched = row("searched", "searched", "addidd", [95.0, 143.0, 214.0])
    claim = claims_of([baseline, searched])[QUALITY]
    assert claim["verdict"] == "yes" and "paired by seed" in claim["sentence"]
    claim = claims_of([replace(baseline, seeds=[1, 5, 4]), searched])[QUALITY]
    assert claim["verdict"] == "not shown" and "Welch" in claim["sentence"]
    # Seeds that one pattern lacks are ignored, although its mean over all its seeds is worse.
    claim = claims_of([row("interleaved", "given", "adadad", [100.0, 150.0]), searched])[QUALITY]
    assert claim["verdict"] == "yes"
    assert claim["figures"]["loss_difference"] == pytest.approx(np.log([95 / 100, 143 / 150]).mean())
    random = random_rows(*([p, 1.5 * p, 2.25 * p] for p in (104.0, 106.0, 105.0)))
    assert claims_of([searched, *random])[BETTER_THAN_RANDOM]["figures"]["p"] < 0.01
    random = [replace(other, seeds=[4, 5, 6]) for other in random]
    assert claims_of([searched, *random])[BETTER_THAN_RANDOM]["figures"]["p"] > 0.3


def test_without_a_test_there_is_no_p_value():
    assert t_test(np.array([1.0]), np.array([2.0, 3.0]), paired=False)["p"] is None
    assert t_test(np.array([1.0, 1.0]), np.array([2.0, 2.0]), paired=False)["p"] is None
    assert t_test(np.array([1.0, 2.0]), np.array([2.0, 3.0]), paired=True)["p"] is None
    assert chance_of_better_draw(1.0, np.array([2.0])) is None
    alone = claims_of([row("searched", "searched", "ad", [99.0]), row("interleaved", "given", "ad", [98.0])])
    assert "no p-value (t-test, Welch): not tested." in alone[QUALITY]["sentence"]


def test_the_chance_of_a_better_draw_has_a_uniform_distribution():
    """If the searched pattern is a random draw, a fifth of the chances are below 0.2."""
    source = np.random.default_rng(0)
    samples = source.normal(size=(2000, 6))
    chances = [chance_of_better_draw(sample[0], sample[1:]) for sample in samples]
    assert np.mean(np.array(chances) < 0.2) == pytest.approx(0.2, abs=0.03)
    # With 2 degrees of freedom the distribution is (1 + t / sqrt(t^2 + 2)) / 2; mean 2, deviation 1, three draws.
    t = (0.5 - 2) / math.sqrt(1 + 1 / 3)
    assert chance_of_better_draw(0.5, np.array([1.0, 2.0, 3.0])) == pytest.approx((1 + t / math.sqrt(t * t + 2)) / 2)


def test_claims_where_the_search_wins():
    claims = claims_of([INTERLEAVED, SEARCHED, *RANDOM])
    quality = claims[QUALITY]
    assert quality["verdict"] == "yes" and quality["figures"]["searched"] == pytest.approx(99.0)
    words = "99.0 ± 0.6 on test, interleaved 101.0 ± 0.6 (mean ± standard error over 3 and 3 seeds): -2.0% by mean loss"
    assert words in quality["sentence"]
    difference = np.log([99.0, 100.0, 98.0]).mean() - np.log([100.0, 102.0, 101.0]).mean()
    assert quality["figures"]["loss_difference"] == pytest.approx(difference)
    assert claims["less latency than interleaved"]["figures"]["ratio"] == 0.5
    assert "0.50 of the interleaved pattern's 20.00 ms: 50% less" in claims["less latency than interleaved"]["sentence"]
    assert claims["fewer blocks of full attention than interleaved"]["figures"] == {"searched": 1, "interleaved": 3}
    random = claims[BETTER_THAN_RANDOM]
    assert random["verdict"] == "yes" and random["figures"]["better_than"] == random["figures"]["of"] == 3
    assert random["figures"]["p"] < 0.01 and random["figures"]["latency_to_searched"] == [1.0, 1.0, 1.0]
    assert random["figures"]["random_means"] == [103.5, 105.5, 104.5]
    assert "(2 seeds each). Their mean" in random["sentence"]
    assert claims["the aim"]["verdict"] == claims["on the Pareto front in the mean"]["verdict"] == "yes"
    assert claims["the search costs less than one training"]["verdict"] == "no"  # 3 hours against 2


def test_claims_where_the_search_loses():
    lost = row("searched", "searched", "aaaadd", [110.0, 111.0, 112.0], ms=15.0)
    random = [replace(other, latency=lost.latency) for other in RANDOM]
    claims = claims_of([INTERLEAVED, lost, *random])
    assert claims[QUALITY]["verdict"] == claims[BETTER_THAN_RANDOM]["verdict"] == claims["the aim"]["verdict"] == "no"
    assert claims["on the Pareto front in the mean"]["figures"]["dominated_by"] == ["random-1", "random-2", "random-3"]
    assert claims["the aim"]["sentence"].endswith(
        "missed: not at most 65% of the interleaved pattern's latency, not better word perplexity, not better "
        "than every random pattern."
    )
    assert "33% more" in claims["fewer blocks of full attention than interleaved"]["sentence"]
    slow = replace(SEARCHED, latency={"median_ms": 14.0, "ratio_to_interleaved": 0.7})  # better, but slow
    random = [replace(other, latency=slow.latency) for other in RANDOM]
    assert claims_of([INTERLEAVED, slow, *random])["the aim"]["verdict"] == "no"


def test_the_verdict_needs_p_below_5_percent():
    for difference, p, verdict in (
        (-1, 0.049, "yes"),
        (1, 0.049, "no"),
        (-1, 0.06, "not shown"),
        (1, None, "not shown"),
    ):
        assert verdict_of({"difference": difference, "p": p}) == verdict


@pytest.mark.parametrize(
    ("perplexities", "verdict", "better_than"),
    [
        ([103.0, 105.0, 104.0, 101.0], "yes", 4),
        ([120.0, 121.0, 122.0, 123.0, 98.9], "yes", 4),  # better than the average, but not than every one
        ([99.5, 99.6, 99.7, 60.0], "not shown", 3),  # better than most, but not than the average
        ([60.0, 61.0, 62.0], "no", 0),
        ([90.0, 140.0], "not shown", 1),
        ([99.5], "not shown", 1),
    ],
)
def test_random_patterns_are_one_sample(perplexities, verdict, better_than):
    """Welch's test of three losses of the searched pattern against one loss of each random pattern."""
    claims = claims_of([INTERLEAVED, SEARCHED, *random_rows(*([p] for p in perplexities))])
    claim = claims[BETTER_THAN_RANDOM]
    expected = t_test(np.log([98.0, 100.0, 99.0]), np.log(perplexities), paired=False)
    assert claim["figures"]["p"] == pytest.approx(expected["p"]) and "(1 seed each). Their mean" in claim["sentence"]
    assert (claim["verdict"], claim["figures"]["better_than"]) == (verdict, better_than)
    aim = verdict if better_than == len(perplexities) or verdict == "no" else "not shown"
    assert claims["the aim"]["verdict"] == aim


def test_each_random_pattern_counts_once_for_any_number_of_seeds():
    figures = claims_of([SEARCHED, *random_rows([100.0] * 9, [110.0])])[BETTER_THAN_RANDOM]["figures"]
    expected = np.log([99.0, 100.0, 98.0]).mean() - np.log([100.0, 110.0]).mean()
    assert figures["loss_difference"] == pytest.approx(expected)


def test_hardly_trained_patterns_are_named():
    """The perplexity per token on valid is sqrt(word perplexity), here 10 and 9.9: above a quarter of 39, not of 40."""
    rows = [row("one", "given", "ad", [100.0, 100.0]), row("two", "given", "dd", [98.0, 98.0])]

    def warning(vocab_size):
        return training_warning([replace(result, vocab_size=vocab_size) for result in rows])

    assert warning(None) is None and warning(41) is None
    assert warning(39.8).startswith("WARNING: one is hardly trained: its perplexity per token on valid is above")
    assert warning(39).startswith("WARNING: one, two are hardly trained: their perplexity")
    assert "a quarter of the 39 tokens of the vocabulary. The claims mean little" in warning(39)


def test_claims_do_not_call_different_latencies_the_same():
    for ms, words in ((5.0, "drawn at its latency, which differs here"), (20.0, "of the same latency or more")):
        claims = claims_of([INTERLEAVED, SEARCHED, *random_rows((103.0, 104.0), (105.0, 106.0), ms=ms)])
        (name,) = [name for name in claims if "random" in name]
        assert name.endswith(words) and ("the aim" in claims) == (ms == 20.0)
        assert claims[name]["figures"]["latency_to_searched"] == [ms / 10, ms / 10]


def test_a_searched_pattern_is_compared_with_its_own_random_patterns():
    """A pattern with two names gets one set of claims."""
    kinds = {"searched-0.4": "diiiid", "searched-0.5": "adiiid", "searched-1": "aadidd", "searched-2": "aadidd"}
    rows = [row(name, "searched", letters, [97.0, 98.0, 96.0]) for name, letters in kinds.items()]
    rows += [row(f"random-1-{n}", "random", "aad", [p, p + 1]) for n, p in enumerate([90.0, 91.0, 92.0])]
    rows += [row(f"random-0.5-{n}", "random", "ad", [p, p + 1]) for n, p in enumerate([103.0, 104.0])]
    rows.insert(0, INTERLEAVED)
    assert claims_of(rows, "searched-0.5")[BETTER_THAN_RANDOM]["figures"]["random_means"] == [103.5, 104.5]
    assert claims_of(rows, "searched-1")[BETTER_THAN_RANDOM]["figures"]["random_means"] == [90.5, 91.5, 92.5]
    assert not any("random" in claim for claim in claims_of(rows, "searched-0.4"))
    assert not claims_of(rows, "searched-2")


def test_the_interleaved_pattern_is_recognised_by_its_blocks():
    named = row("interleaved-6", "given", "adadad", [100.0, 102.0, 101.0], ms=20.0)
    wrong = row("interleaved", "given", "dddddd", [100.0, 102.0, 101.0], ms=20.0)
    assert any("than interleaved" in name for name in claims_of([named, SEARCHED]))
    assert not any("perplexity than interleaved" in name for name in claims_of([wrong, SEARCHED]))


def test_faster_or_better_patterns_dominate_and_equal_ones_do_not():
    def others(*rows):
        return [r.contender.name for r in dominating(SEARCHED, [SEARCHED, *rows], choose_metric([SEARCHED]))]

    perplexities = [99.0, 100.0, 98.0]
    assert others(row("same", "given", "d", perplexities)) == []
    assert others(row("faster", "given", "d", perplexities, ms=9.0)) == ["faster"]
    assert others(row("better", "given", "d", [90.0], ms=10.0)) == ["better"]
    assert others(row("better but slower", "given", "d", [90.0], ms=10.1)) == []
    assert others(row("not timed", "given", "d", [90.0], ms=None)) == []


def test_one_run_without_comparable_words_makes_the_metric_bits_per_byte():
    rows = [row("interleaved", "given", "adad", [100.0, 101.0])]
    rows.append(row("searched", "searched", "addd", [99.0, 98.0], comparable=False))
    claim = claims_of(rows)["better bits per byte than interleaved"]
    bits = [np.mean([500 * math.log(p) / math.log(2) / 2500 for p in pair]) for pair in ((99, 98), (100, 101))]
    assert claim["figures"]["searched"] == pytest.approx(bits[0])
    assert claim["figures"]["loss_difference"] == pytest.approx((bits[0] - bits[1]) * math.log(2))
    assert f"{bits[0] - bits[1]:+.4f}" in claim["sentence"]
    assert "bits per byte, test" in markdown(rows)
    _, content = csv.DictReader(io.StringIO(csv_text(rows)))
    assert content["word_perplexity_mean"] == "" and float(content["nll_mean"]) > 0


def test_the_table_lists_the_best_pattern_first_and_shows_both_splits():
    lines = markdown([INTERLEAVED, SEARCHED, *RANDOM]).splitlines()
    names = ["searched", "interleaved", "random-1", "random-3", "random-2"]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in names]
    assert "| 99.0 ± 0.6 | 104.0 ± 0.6 | 3 | 10.00 | 0.500 |" in lines[2] and lines[2].endswith("3.00 + 2.00 |")


def test_contenders_are_read_back_with_their_finished_runs(tmp_path):
    contenders = [SEARCHED.contender, INTERLEAVED.contender, Contender("untimed", "given", ["dense"])]
    latencies = {"patterns": {"addidd": SEARCHED.latency, "adadad": INTERLEAVED.latency}, "holds_for": {"threads": 1}}
    contenders.append(Contender("random-1", "random", expand("addidd")))
    settings = Settings(tmp_path, seeds=[1, 2], random_seeds=[1])
    write_contenders(tmp_path, contenders, settings, {"searched": 3.0}, latencies)
    (tmp_path / "provenance.yaml").write_text("vocab_size: 77\n")
    with pytest.raises(InputError, match="none of its runs has finished"):
        read_results(tmp_path)
    for name, perplexity in (("addidd-1", 99.0), ("addidd-2", 100.0), ("adadad-2", 102.0), ("d-1", 50.0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "results.yaml").write_text(yaml.safe_dump(results(perplexity)))
    searched, baseline, untimed, random = read_results(tmp_path)
    assert (random.seeds, random.vocab_size) == ([1], 77)  # its run with seed 2 belongs to the searched pattern
    assert (searched.contender, searched.seeds, searched.search_hours) == (SEARCHED.contender, [1, 2], 3.0)
    assert (baseline.seeds, baseline.search_hours, baseline.latency) == ([2], 0.0, INTERLEAVED.latency)
    assert untimed.latency is None and untimed.runs[0]["test"]["word_perplexity"] == 50.0
    assert known_latencies(tmp_path) == latencies
