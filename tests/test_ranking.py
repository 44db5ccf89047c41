"""The ranking experiment: its tables."""

import pytest

from nas.networks.space import make_network
from tests.making import load_script


def test_the_report_has_a_tau_for_each_judge(capsys):
    ranking = load_script("ranking/run")
    blocks = [["attention"], ["attention", "dense"], ["attention", "dense", "dense"], ["dense"]]
    drawn = [{"blocks": own, "flops": len(own)} for own in blocks]
    networks = [make_network(900, 8 * index + 8, own) for index, own in enumerate(blocks)]
    rungs = [{"0.125": 3.0 + index, "0.25": 2.5 - index / 5, "0.5": 2.2 - index / 9} for index in range(4)]
    results = [{"bits_per_byte": 2.0 - index / 10, "rungs": own} for index, own in enumerate(rungs)]
    taus = ranking.report(networks, drawn, results)["tau"]
    assert taus["loss after 0.125"] == -1 and taus["loss after 0.25"] == taus["loss after 0.5"] == 1
    assert taus["FLOPs (more is better)"] == pytest.approx(0.183, abs=1e-3)
    shown = capsys.readouterr().out
    assert "| 900-32-d | 1.7000 | -1.0000 | 0.0000 | 6.0000 |" in shown and "law after 0.5" in shown
