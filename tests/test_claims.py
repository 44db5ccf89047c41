"""The results of a comparison, its claims, tables and figure."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nas.comparison.results import (
    NetworkResult,
    choose_metric,
    describe,
    dunnett,
    make_claims,
    read_claims,
    read_results,
    spread_notice,
    training_warning,
    verdict_of,
)
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.reporting.comparison_report import csv_records, csv_text, table
from nas.reporting.figures import comparison_plot
from tests.making import results


def row(name: str, perplexities, ms: float = 10.0, **about) -> NetworkResult:
    runs = [results(perplexity, ms=ms, **about) for perplexity in perplexities]
    folders = tuple(Path(f"{name}-{seed}") for seed in range(1, len(runs) + 1))
    return NetworkResult(name, name, runs, ms, ms / 10, 77, folders)


FOUND = row("found", [98.0, 100.0, 99.0])
WORSE = row("interleaved", [101.0, 103.0, 102.0], ms=20.0)
EQUAL, ONCE = row("par", [99.2, 99.3, 99.4]), row("random", [150.0])


def claims_of(*rows, margin=0.01) -> dict[str, dict]:
    return {claim["pattern"]: claim for claim in make_claims([*rows], margin)}


def test_dunnett_against_simulated_draws():
    """With a pooled variance, t of every other sample; p by the largest |t| of draws without any difference."""
    control, *others = samples = [np.array(one) for one in ([1.0, 2, 4], [3.0, 5, 6.5, 8], [2.5], [9.0, 11])]
    sizes, freedom = np.array([len(sample) for sample in samples]), sum(map(len, samples)) - len(samples)
    pooled = sum(((sample - sample.mean()) ** 2).sum() for sample in samples) / freedom
    errors = np.sqrt(pooled * (1 / sizes[1:] + 1 / sizes[0]))
    generator = np.random.default_rng(0)
    means = generator.standard_normal((400_000, len(samples))) / np.sqrt(sizes)
    spreads = np.sqrt(generator.chisquare(freedom, 400_000) / freedom)
    drawn = np.abs((means[:, :1] - means[:, 1:]) / np.sqrt(1 / sizes[1:] + 1 / sizes[0]) / spreads[:, None]).max(axis=1)
    limit = np.quantile(drawn, 0.95)
    for other, error, result in zip(others, errors, dunnett(control, others), strict=True):
        difference = control.mean() - other.mean()
        assert result["loss_difference"] == pytest.approx(difference)
        assert result["p"] == pytest.approx((drawn >= abs(difference) / error).mean(), abs=0.004)
        assert result["interval"] == pytest.approx([difference - limit * error, difference + limit * error], rel=0.02)


def test_nothing_is_tested_if_nothing_varies():
    for control, other in (([1.0], [2.0]), ([1.0, 1.0], [2.0, 2.0])):
        (test,) = dunnett(np.array(control), [np.array(other)])
        assert test == {"loss_difference": -1.0, "interval": None, "p": None}
    claim = claims_of(row("found", [98.0]), row("one", [99.0]))["one"]
    assert claim["verdict"] == "not shown" and "not tested" in claim["sentence"]


@pytest.mark.parametrize(
    ("difference", "p", "high", "verdict"),
    [
        (-1.0, 0.049, -0.1, "better"),
        (1.0, 0.049, 1.5, "worse"),
        (-1.0, 0.051, 0.009, "no worse"),
        (-1.0, 0.051, 0.011, "not shown"),
    ],
)
def test_the_verdict_needs_p_below_5_percent_or_an_interval_below_the_margin(difference, p, high, verdict):
    assert verdict_of({"loss_difference": difference, "p": p, "interval": [-9.0, high]}, 0.01) == verdict


def test_claims_of_the_control_against_each_other_network():
    claims = claims_of(FOUND, WORSE, EQUAL, ONCE, margin=0.02)
    verdicts = {name: claim["verdict"] for name, claim in claims.items()}
    assert verdicts == {"interleaved": "better", "par": "no worse", "random": "better"}
    assert claims_of(FOUND, EQUAL, margin=0.01)["par"]["verdict"] == "not shown"
    assert claims_of(WORSE, FOUND)["found"]["verdict"] == "worse"
    claim = claims["interleaved"]
    difference = np.log([99.0, 100.0, 98.0]).mean() - np.log([101.0, 103.0, 102.0]).mean()
    assert claim["evidence"]["loss_difference"] == pytest.approx(difference)
    words = "found against interleaved: better. word perplexity 99.0 ± 0.6 against 102.0 ± 0.6 on test (3 and 3 seeds)"
    assert claim["sentence"].startswith(f"{words}, -2.9%, 95% interval ")
    assert claim["sentence"].endswith("at 0.50 of its latency.") and claim["evidence"]["ratio"] == 0.5


@pytest.mark.parametrize(("p", "words"), [(0.0307, "p = 0.031"), (0.001, "p = 0.001"), (0.0009, "p < 0.001")])
def test_a_test_in_words(p, words):
    test = {"loss_difference": math.log(0.9), "interval": [math.log(0.8), math.log(0.95)], "p": p}
    assert describe(test, choose_metric([FOUND])) == f"-10.0%, 95% interval -20.0% to -5.0%, {words}"


def test_a_network_with_several_names_is_one_sample():
    names = [replace(WORSE, name=name) for name in ("one", "two", "three")]
    claims, alone = claims_of(FOUND, EQUAL, *names), claims_of(FOUND, EQUAL, WORSE)["interleaved"]
    assert claims["one"]["evidence"] == claims["three"]["evidence"] == alone["evidence"]


def test_the_margin_is_a_share_of_the_metric_in_words_and_in_bits():
    """Control and other are equal; the interval ends at a known difference."""
    for comparable in (True, False):
        rows = [row(name, [100.0, 101.0, 99.0], comparable=comparable) for name in ("found", "other")]
        (claim,) = make_claims(rows, 0.5)
        high, metric = claim["evidence"]["interval"][1], choose_metric(rows)
        share = math.expm1(high) if comparable else high / rows[0].losses(metric).mean()
        verdicts = [make_claims(rows, share * factor)[0]["verdict"] for factor in (1.001, 0.999)]
        assert verdicts == ["no worse", "not shown"]


def test_different_spreads_cause_a_notice():
    wide, narrow = row("wide", [80.0, 100.0, 125.0]), row("narrow", [99.05, 99.1, 99.15])
    assert spread_notice([FOUND, WORSE, EQUAL]) is None and spread_notice([FOUND, ONCE]) is None
    assert "(p = 0.00" in spread_notice([FOUND, narrow])
    assert "networks differ in their spread over seeds (p = 1.4e-05)" in spread_notice([FOUND, EQUAL, wide])


def test_hardly_trained_networks_are_named():
    """The perplexity per token on valid is sqrt(word perplexity), here 10 and 9.9: above a quarter of 39, not of 40."""
    rows = [row("one", [100.0, 100.0]), row("two", [98.0, 98.0])]

    def warning(vocab_size):
        return training_warning([replace(result, vocab_size=vocab_size) for result in rows])

    assert warning(41) is None
    assert warning(39.8).startswith("WARNING: hardly trained: one. The perplexity per token")
    assert warning(39).startswith("WARNING: hardly trained: one, two. ")


def test_one_run_without_comparable_words_makes_the_metric_bits_per_byte():
    rows = [row("found", [99.0, 98.0], comparable=False), row("interleaved", [100.0, 101.0])]
    claim = claims_of(*rows)["interleaved"]
    bits = [np.mean([500 * math.log(p) / math.log(2) / 2500 for p in pair]) for pair in ((99, 98), (100, 101))]
    assert claim["evidence"]["metric"] == "bits per byte"
    assert claim["evidence"]["loss_difference"] == pytest.approx((bits[0] - bits[1]) * math.log(2))
    assert f"{bits[0] - bits[1]:+.4f}" in claim["sentence"]
    assert "bits per byte, test" in table(rows)[0]
    _, _, *cells = table([FOUND])[0].values()
    assert cells[:6] == ["99.0 ± 0.6", "104.0 ± 0.6", "", "3", "10", "1.000"]  # test, then valid
    first, *_, last = csv.DictReader(io.StringIO(csv_text([record for one in rows for record in csv_records(one)])))
    assert first["test_word_perplexity"] == "" and float(first["test_bits_per_byte"]) > 0
    assert (last["name"], last["seed"], last["valid_word_perplexity"]) == ("interleaved", "2", "106")


def test_results_are_read_from_settings_runs_and_latencies(tmp_path):
    networks = {"found": "77-16-ad", "interleaved": "77-32-ad", "same": "77-16-ad", "missing": "77-16-d"}
    write_yaml(tmp_path / "comparison.yaml", {"patterns": networks, "margin": 0.01})
    known = {"networks": {"77-32-ad": 2.5}}
    write_yaml(tmp_path / "latencies.yaml", known)
    with pytest.raises(InputError, match="none of its runs has finished"):
        read_results(tmp_path)
    for name, perplexity in (("77-32-ad-2", 90.0), ("77-16-ad-1", 99.0), ("77-16-ad-2", 100.0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_yaml(tmp_path / "runs" / name / "results.yaml", results(perplexity))
        write_yaml(tmp_path / "runs" / name / "provenance.yaml", {"vocab_size": 77})
        if name == "77-32-ad-2":
            assert read_claims(tmp_path, read_results(tmp_path)) == []  # the control has not finished
    found, interleaved, same = read_results(tmp_path)  # the control, and then the best
    assert [run["test"]["word_perplexity"] for run in found.runs] == [99.0, 100.0]
    assert (found.name, interleaved.name, same.name) == ("found", "interleaved", "same") and found.runs == same.runs
    assert (interleaved.latency, interleaved.ratio, interleaved.vocab_size) == (2.5, 0.25, 77)
    assert (found.latency, found.ratio) == (10.0, 1.0)  # of its training
    claims = read_claims(tmp_path, [found, interleaved, same])  # `same` is the network of the control
    assert [claim["pattern"] for claim in claims] == ["interleaved"]


def test_the_plot_names_outliers_and_draws_the_front(tmp_path, saved_figures):
    rows = [FOUND, WORSE, replace(FOUND, name="same"), EQUAL, row("dense-only", [900.0], ms=5.0)]
    comparison_plot(rows, tmp_path / "plot.png")
    axes = saved_figures[0].axes[0]
    assert axes.get_title(loc="left") == "outside: dense-only 900.0" and axes.get_ylim()[1] < 150
    assert [text.get_text() for text in axes.texts] == ["found\nsame", "par", "interleaved"]
    (front,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    comparison_plot([rows[-1], *rows[:-1]], tmp_path / "plot.png")
    assert saved_figures[1].axes[0].get_title(loc="left") == ""  # the control is always shown
    assert set(front.get_xdata()) == {10}  # the outlier is faster, but outside; interleaved is dominated
