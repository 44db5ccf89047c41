"""The fit of the surrogate's prior, against a slow reference."""

import csv

import numpy as np

from nas.core.files import write_yaml
from nas.core.pattern import expand
from nas.search.space import make_network
from nas.search.surrogate import NOISE, OWN, TERMS, Point, Surrogate
from tests.making import load_script


def test_the_fit_is_a_regression_with_random_effects_of_networks_and_sizes():
    """Least squares in which every effect is a column, and every prior a row. The surrogate has seen no text."""
    prior, generator = load_script("versus/prior"), np.random.default_rng(0)
    patterns = [["attention"], ["dense"], ["attention", "dense"], ["dense", "attention", "dense"]]
    networks = [make_network(size, 8 * size // 100, own) for size in (800, 1600) for own in patterns]
    texts = [[Point(n, t, 2 + generator.random()) for n in networks[:count] for t in (0.125, 1.0)] for count in (8, 6)]
    full = [[row % 4 < 2 for row in range(len(own))] for own in texts]  # judged at full lengths, if it is a trial
    surrogate, points = Surrogate([], networks), [point for own in texts for point in own]
    known = surrogate.inputs([point.network for point in points], [point.share for point in points])
    columns = [list(row) for row in known.features]
    priors = [(0, spread) for spread in (*prior.WIDER * surrogate.spread, *[prior.MISJUDGED] * 8, *[1] * 6)]
    effects = sorted(
        {(text, key) for text, own in enumerate(texts) for p in own for key in (p.network, p.network[:2])}, key=str
    )
    priors += [(0, OWN)] * len(effects)
    of_text = [text for text, own in enumerate(texts) for _ in own]
    for row, point, text, long in zip(columns, points, of_text, [flag for own in full for flag in own], strict=True):
        blocks = point.network.blocks
        attending = [place for place, block in enumerate(blocks) if block == "attention"]
        wrong = [0.0] * 4
        if long and point.share < 1 and attending:
            places = np.linspace(-1, 1, len(blocks)) if len(blocks) > 1 else np.zeros(1)
            others = [places[place] for place in range(len(blocks)) if place not in attending]
            later = np.mean(places[attending]) - np.mean(others) if others else 0.0
            share = np.log((len(attending) + 0.5) / (len(blocks) / 2 + 0.5))
            wrong = [1.0, np.log(len(blocks)) - surrogate.mean_log_sizes[2], share, later]
        row += [*wrong, *(np.log(point.share) * np.array(wrong))]
        for value in (1.0, np.log(point.share), point.share == 1):
            row += [value * (text == number) for number in range(2)]
        row += [float(effect in ((text, point.network), (text, point.network[:2]))) for effect in effects]
    means, spreads = np.array(priors, dtype=float).T
    rows = np.vstack([np.array(columns) / NOISE, np.diag(1 / spreads)])
    wanted = np.concatenate([np.log([point.loss for point in points]) / NOISE, means / spreads])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][: len(TERMS)]
    errors = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[: len(TERMS)]
    found = prior.fit([dict(zip(own, flags, strict=True)) for own, flags in zip(texts, full, strict=True)])
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    np.testing.assert_allclose(found[1], errors, rtol=1e-4)


def test_trials_of_a_search_replace_its_own_and_each_loss_counts_once(tmp_path, monkeypatch):
    prior, network = load_script("versus/prior"), make_network(2000, 64, expand("ad"))
    table, run = tmp_path / "trainings.csv", tmp_path / "runs" / "trials" / "2000-64-ad"
    rows = [("wikitext2", "earlier", 2000, 64, "ad", 0.5, loss, "full") for loss in (1.43219, 1.4322)]
    rows += [("wikitext2", "runs/trials", 2000, 64, "ad", 0.5, 1.7, "trial"), ("stdlib", *rows[0][1:])]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([prior.COLUMNS, *rows])
    run.mkdir(parents=True)
    write_yaml(run / "config.yaml", {"data": {"vocab_size": 2000}, "model": {"d_model": 64}, "pattern": expand("ad")})
    for step, loss in ((4, 1.45), (8, 1.4)):  # a whole trial is a training: results.yaml has its loss
        write_yaml(run / f"trial-{step}.yaml", {"step": step, "of_steps": 8, "valid": {"bits_per_byte": loss}})
    write_yaml(run / "results.yaml", {"valid": {"bits_per_byte": 1.3}, "train_tokens_per_s": 9.0})
    for name, found in (("TRAININGS", table), ("read_grid", lambda text: []), ("read_frontier", lambda text: [])):
        monkeypatch.setattr(prior, name, found)
    prior.write_trainings("wikitext2", [tmp_path / "runs"])
    wanted = {(0.5, 1.4322): True, (0.5, 1.45): False, (1.0, 1.3): False}
    assert prior.read_points("wikitext2") == {Point(network, *key): full for key, full in wanted.items()}
    assert prior.read_points("stdlib") == {Point(network, 0.5, 1.4322): True}
