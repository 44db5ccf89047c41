"""The comparison of three searches, and the ranking of judges: their tables."""

import pytest

from tests.making import load_script


def test_the_report_compares_the_networks_of_each_search_with_those_of_the_trials(tmp_path, capsys):
    versus = load_script("versus/run")
    jobs = versus.Jobs(tmp_path, [], "*")
    found = {"trials": (100, 101, 99), "random": (110, 111, 109), "gumbel": (100.5, 99.5, 101)}
    network = {"vocab_size": 900, "d_model": 8, "blocks": ["dense"]}
    for name, perplexities in found.items():
        for seed, value in enumerate(perplexities, start=1):
            figures = {"word_perplexity": value}
            jobs.do(f"{name}-{seed}", lambda: {"network": network, "seconds": 5.0})
            jobs.do(f"{name}-{seed}-trained", lambda: {"valid": figures, "test": figures})  # noqa: B023
    jobs.do("gumbel-4", lambda: {"network": network | {"blocks": []}, "seconds": 5.0})
    table, shown = versus.report(jobs), capsys.readouterr().out
    assert table["random"]["behind"] == pytest.approx(0.1, abs=1e-3) and table["random"]["p"] < 0.001
    assert table["gumbel"]["p"] > 0.5 and "| trials | 3 | 100.0 | 1.0% | +0.0% |  |" in shown
    assert table["gumbel"]["searches"] == 3 and "| gumbel | 4 | 900, 8, `no block` | none |  | 5 |" in shown
    assert "| trials | 2 | 900, 8, `d` | 101.0 | 101.0 | 5 |" in shown


def test_each_judge_has_a_tau(capsys):
    blocks = [["attention"], ["attention", "dense"], ["attention", "dense", "dense"], ["dense"]]
    rungs = [{"0.125": 3.0 + index, "0.25": 2.5 - index / 5, "0.5": 2.2 - index / 9} for index in range(4)]
    found = [
        {
            "vocab_size": 900 + 100 * (index == 1),
            "d_model": 8 * index + 8,
            "blocks": own,
            "flops": len(own),
            "rungs": rungs[index],
        }
        | {"bits_per_byte": 2.0 - index / 10}
        for index, own in enumerate(blocks)
    ]
    ranking = load_script("versus/ranking").report(found)
    taus, within = ranking["tau"], ranking["within"]
    assert within["loss after 0.125"] == -1 and within["vocabulary (larger is better)"] == 0
    assert within["FLOPs (more is better)"] == pytest.approx(0, abs=1e-3)
    assert taus["loss after 0.125"] == -1 and taus["loss after 0.25"] == taus["loss after 0.5"] == 1
    assert taus["FLOPs (more is better)"] == pytest.approx(0.183, abs=1e-3) and taus["law before trials"] > 0
    shown = capsys.readouterr().out
    assert "| 900-32-d | 1.7000 | -1 | -900 | 0 |" in shown and "law after 0.5" in shown
