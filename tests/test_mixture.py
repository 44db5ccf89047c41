"""The mixture of a network, a cache and counts, against slow references in float64."""

import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import check_grad

from nas import load_model
from nas.core.config import MixtureOptions
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.data.corpus import Corpus, prepare
from nas.inference.exporting import DISTRIBUTION, model_card
from nas.inference.generation import Sampling
from nas.inference.harness import Harness
from nas.mixture.cache import DECAYS, FEATURES, Cache
from nas.mixture.counts import (
    USUAL_DISCOUNTS,
    Counts,
    Order,
    PackedCounts,
    count_ngrams,
    counts_distribution,
    pack,
    pack_within,
    read_counts,
)
from nas.mixture.gate import masked_softmax, penalised_loss
from nas.mixture.mixture import Seen, Stream, load_mixture, open_mixture
from nas.mixture.states import StateCache, principal_directions
from nas.mixture.without_network import train_nll
from nas.reporting.figures import PART_COLOURS
from nas.training.train_step import residual_loss
from tests.processes import refuse, succeed

V, ORDERS = 12, [1, 2, 3, 5]


def random_stream(length: int, seed: int = 0) -> np.ndarray:
    """Tokens that often repeat what stood 7 tokens before; some never occur."""
    generator, tokens = np.random.default_rng(seed), []
    for place in range(length):
        again = place >= 7 and generator.random() < 0.6
        tokens.append(tokens[-7] if again else int(generator.zipf(1.7)) % (V - 2))
    return np.array(tokens)


def kneser_ney(text: list[int], order: int):
    """p(token | context), by the definition of Chen and Goodman (1998), section 3."""
    grams = [Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for n in range(order + 2)]
    counts, discounts = {}, {}
    for n in range(1, order + 1):
        counts[n] = Counter(gram[1:] for gram in grams[n + 1]) if n < order else grams[n]
        if n < order:
            counts[n][tuple(text[:n])] += 1  # the first token has another one before it
        n1, n2, n3, n4 = (sum(c == k for c in counts[n].values()) for k in (1, 2, 3, 4))
        discounts[n] = USUAL_DISCOUNTS
        if min(n1, n2, n3, n4):
            y = n1 / (n1 + 2 * n2)
            found = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
            discounts[n] = found if found[0] >= 0 and sorted(found) == list(found) else USUAL_DISCOUNTS

    def p(token: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        shorter = p(token, context[1:]) if context else 1 / V
        followers = {gram: c for gram, c in counts[n].items() if gram[:-1] == context}
        total, own = sum(followers.values()), followers.get((*context, token), 0)
        if not total:
            return shorter
        lost = {gram: discounts[n][min(c, 3) - 1] for gram, c in followers.items()}
        return (own - lost.get((*context, token), 0) + sum(lost.values()) * shorter) / total

    return p


def exact_counts(text: np.ndarray, order: int) -> Counts:
    """All n-grams, whose shares are not rounded."""
    orders = count_ngrams(text, V, order)
    share = np.concatenate([own.share for own in orders])
    return pack(orders)._replace(codes=np.arange(len(share)), values=share).unpack(V)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("length", [5, 400])
def test_counts_are_modified_kneser_ney_and_sum_to_one(order, length):
    text, stream = random_stream(length), random_stream(60, seed=1)
    p, orders = kneser_ney(text.tolist(), order), count_ngrams(text, V, order)
    tables = {"exact": exact_counts(text, order)}
    tables |= {f"{most} n-grams": pack(orders, most).unpack(V) for most in (None, 20, 0)}  # rounded
    for name, counts in tables.items():
        nodes, found = np.full(order, -1, np.int64), np.zeros(1)
        for place, token in enumerate(stream):
            context, whole = tuple(stream[max(0, place - order + 1) : place].tolist()), np.zeros(V)
            counts_distribution(*counts, nodes, 1.0, whole)
            assert whole.sum() == pytest.approx(1, abs=1e-6)
            if name in ("exact", "None n-grams"):
                expected, off = [p(other, context) for other in range(V)], 1e-5 if name == "exact" else 0.15
                np.testing.assert_allclose(whole, expected, rtol=off)
            read_counts(stream[place : place + 1], *counts, nodes, found, np.zeros((1, 3 * order - 2)))
            assert found[0] == pytest.approx(whole[token], rel=1e-9)


def test_the_counts_keep_the_n_grams_without_which_the_text_loses_most(tmp_path):
    text, order = random_stream(400), 3
    p, orders, grams = (
        kneser_ney(text.tolist(), order),
        count_ngrams(text, V, order),
        [[(token,) for token in range(V)]],
    )
    for own in orders[1:]:
        grams.append([(*grams[-1][parent], int(last)) for parent, last in zip(own.parents, own.last, strict=True)])
    lost = {}
    for n in (3, 2):  # a context is worth as much as the best n-gram that needs it
        places = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        for gram in grams[n - 1]:
            context, shorter = gram[:-1], gram[1:-1]
            rest = [other for other in range(V) if (*context, other) not in grams[n - 1]]
            left = sum(p(other, context) for other in rest) / sum(p(other, shorter) for other in rest)
            own = p(gram[-1], context)
            more = own - left * p(gram[-1], shorter) + left  # its share goes to the rest
            others = sum(p(other, context) * math.log(more / left) for other in rest)
            occurrences = sum(place[:-1] == context for place in places)
            lost[gram] = occurrences * (own * math.log(own / (more * p(gram[-1], shorter))) - others)
            lost[gram] = max([lost[gram], *(lost[longer] for longer in lost if longer[:-1] == gram)])
    for most in (10, 40, 100):
        counts, limit = pack(orders, most), sorted(lost.values())[-most - 1]
        kept = [gram for gram in lost if lost[gram] > (1 + 1e-5) * limit]
        assert 0.7 * most < len(kept) <= most and len(counts.last) == V + len(kept)
        assert int(counts.children[:V].sum()) == sum(len(gram) == 2 for gram in kept)
        contexts = np.repeat(np.arange(V), counts.children[:V])
        pairs = list(zip(contexts.tolist(), counts.last[V:].tolist(), strict=False))
        assert pairs == sorted(gram for gram in kept if len(gram) == 2)

    def nll(most: int, orders: list[Order]) -> float:
        counts, nodes, found = pack(orders, most).unpack(V), np.full(order, -1, np.int64), np.zeros(len(text))
        read_counts(text, *counts, nodes, found, np.zeros((len(text), 3 * order - 2)))
        return -np.log(found).mean()

    assert nll(40, orders) < nll(40, [own._replace(lost=own.share) for own in orders]) - 0.05
    for size in (2000, 2300):
        file = tmp_path / "counts.npz"
        file.write_bytes(pack_within(orders, size))
        assert 0.93 * size < file.stat().st_size <= size
        assert len(Counts.load(file, V).last) > V
    with pytest.raises(InputError, match=r"the counts of single tokens take [\d,]+ bytes, and only 100 are left"):
        pack_within(orders, 100)


def naive_cache(stream: list[int], order: int, decay: float) -> list[dict[int, float]]:
    """The distribution before each token; empty without a vote."""
    seen, found = defaultdict(list), []
    for place, token in enumerate(stream):
        context = tuple(stream[place - order + 1 : place]) if place >= order - 1 else None
        counts = defaultdict(float)
        for then, other in seen[context]:
            counts[other] += decay ** (place - then)
        total = sum(counts.values())
        found.append({other: count / total for other, count in counts.items()} if context is not None else {})
        if context is not None:
            seen[context].append((place, token))
    return found


@pytest.mark.parametrize("faster", [1.0, 0.4])  # with 0.4 the unit of counts is renewed
def test_the_cache_equals_a_naive_one_and_sums_to_one(faster):
    stream, cache = random_stream(900), Cache(ORDERS)
    cache.decays *= faster
    reference = [naive_cache(stream.tolist(), n, DECAYS.get(n, 0.9999) * faster) for n in ORDERS]
    for place, token in enumerate(stream):
        features, found = np.zeros((1, FEATURES * len(ORDERS))), np.zeros((1, len(ORDERS)))
        known = np.zeros_like(features)
        cache.describe(known)
        for index, own in enumerate(before[place] for before in reference):
            distribution = np.zeros(V)
            cache.add(np.eye(len(ORDERS))[index], distribution)
            expected = [own.get(other, 0) for other in range(V)]
            np.testing.assert_allclose(distribution, expected, rtol=0, atol=1e-12)
            assert known[0, index * FEATURES] == bool(own)
        cache.read(stream[place : place + 1], found, features)
        assert (features == known).all()
        np.testing.assert_allclose(found[0], [own[place].get(token, 0) for own in reference], rtol=0, atol=1e-12)


def test_the_cache_of_states_equals_a_loop(monkeypatch):
    monkeypatch.setattr("nas.mixture.states.CHUNK", 7)
    stream, hidden = random_stream(60), np.random.default_rng(3).normal(size=(60, 5)).astype(np.float32)
    projection = principal_directions(hidden)
    projected, cache = hidden @ projection[:-1] + projection[-1], StateCache(5, length := 20)
    found, features = np.zeros(60), np.zeros((60, 2), np.float32)
    for piece in (slice(0, 33), slice(33, 34), slice(34, 60)):
        cache.read(projected[piece], stream[piece], found[piece], features[piece])
    states = hidden.astype(float) - hidden.mean(axis=0)  # all directions
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    for place in range(60):
        terms = {then: math.exp(10 * states[place] @ states[then]) for then in range(max(0, place - length), place)}
        own = sum(term for then, term in terms.items() if stream[then] == stream[place])
        assert found[place] == pytest.approx(own / sum(terms.values()) if terms else 0, rel=1e-4)
        assert features[place, 1] == pytest.approx(max(terms.values()) / sum(terms.values()) if terms else 0, rel=1e-4)
    after = np.zeros(2, np.float32)
    terms, expected = cache.terms(projected[:1], after), np.exp(10 * states[40:] @ states[0])
    np.testing.assert_allclose(terms, expected, rtol=1e-4)
    np.testing.assert_allclose(after, [math.log(expected.sum()), expected.max() / expected.sum()], rtol=1e-4)
    np.testing.assert_array_equal(cache.followers, stream[40:])
    normalized = principal_directions(
        hidden - hidden.mean(axis=1, keepdims=True)
    )  # their sums have only rounding errors
    assert (normalized != 0).any(axis=0).tolist() == [True] * 4 + [False]


def test_the_gradient_of_a_gate_is_that_of_its_loss():
    generator = np.random.default_rng(0)
    inputs, p, votes = generator.normal(size=(50, 4)), generator.random((50, 3)), generator.random((50, 3)) < 0.7
    votes[:, 0] = True
    p *= votes
    flat, data = generator.normal(size=12), (inputs, p, votes)
    parts = (lambda x: penalised_loss(x, *data)[0], lambda x: penalised_loss(x, *data)[1])
    assert check_grad(*parts, flat) < 1e-6
    weights = masked_softmax(inputs @ flat.reshape(4, 3), votes)
    assert (weights[~votes] == 0).all() and np.allclose(weights.sum(axis=1), 1)


@pytest.fixture(scope="module")
def corpus(small_yaml, tmp_path_factory) -> Corpus:
    from nas.core.config_loading import load_config

    return Corpus(prepare(load_config(small_yaml, []).data))


def network_of(stream: np.ndarray, size: int, width: int = 3):
    """Log-probabilities [N, V] and hidden states [N, D] of a made-up network before each token but the first."""
    generator = np.random.default_rng(5)
    logits, hidden = generator.normal(size=(len(stream) - 1, size)), generator.normal(size=(len(stream) - 1, width))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), hidden.astype(np.float32)


@pytest.mark.parametrize("width", [3, 0])
@pytest.mark.parametrize(
    "options", [{}, {"states": 50, "cache": [], "counts": 2}, {"states": 0, "cache": [2], "counts": 0}], ids=str
)
def test_token_by_token_equals_all_at_once_and_sums_to_one(corpus, options, width):
    if not width and options.get("counts") == 0:
        pytest.skip("a cache alone has no vote at first")
    stream, mixture = corpus.tokens("valid").astype(np.int64), open_mixture(MixtureOptions(**options), corpus, width)
    log_p, hidden = network_of(stream, corpus.vocab_size, width)
    nll = -log_p[np.arange(len(log_p)), stream[1:]]
    network, middle = (nll, hidden) if width else (None, None), (len(stream) - 1) // 2
    seen = mixture.look(stream, *network)
    crossed = mixture.fit(stream, *network)
    whole, shares = mixture.mix(seen)
    own = mixture.gate, mixture.bounds
    halves, starts = (slice(0, middle), slice(middle, len(stream) - 1)), []
    for half in halves:  # short streams take part
        starts.append([])
        for length in (64, 1024):
            for start in range(half.start, half.stop - length + 1, 8 * length):
                state = [array[start : start + length] for array in network] if width else network
                starts[-1].append(mixture.look(stream[start : start + length + 1], *state))
    assert all(starts)
    for fitted, judged in ((1, 0), (0, 1)):  # a half has the weights of the other one
        parts = [Seen(*(array[halves[fitted]] for array in seen)), *starts[fitted]]
        mixture.fit_to(Seen(*map(np.concatenate, zip(*parts, strict=True))))
        own_half = Seen(*(array[halves[judged]] for array in seen))
        assert crossed[halves[judged]] == pytest.approx(mixture.mix(own_half)[0])
    mixture.gate, mixture.bounds = own
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    reader = Stream(mixture)
    reader.read(stream[:1], hidden[:1] if width else None)
    for place, token in enumerate(stream[1:200]):
        p = reader.predict(log_p[place] if width else None)
        assert p.sum() == pytest.approx(1, abs=1e-6) and (p >= 0).all()
        assert -math.log(p[token]) == pytest.approx(whole[place], abs=1e-6)
        reader.read(np.array([token]), hidden[place + 1 : place + 2] if width else None)
    assert "network" not in mixture.parts or mixture.mix(seen, without=tuple(mixture.parts[1:]))[0] == pytest.approx(
        nll
    )


def test_a_mixture_is_no_worse_where_nothing_repeats(corpus):
    generator = np.random.default_rng(2)
    mixture = open_mixture(MixtureOptions(), corpus, 1)
    p = generator.dirichlet(np.ones(corpus.vocab_size) * 0.3)
    streams = [generator.choice(corpus.vocab_size, 20_000, p=p) for _ in "vt"]  # what the network knows already
    valid, test = (mixture.look(one, -np.log(p[one[1:]]), np.zeros((len(one) - 1, 1), np.float32)) for one in streams)
    mixture.fit_to(valid)
    assert mixture.mix(test)[0].mean() <= 1.001 * -np.log(p[streams[1][1:]]).mean()


def test_every_part_has_a_colour(corpus):
    parts = open_mixture(MixtureOptions(), corpus, 3).parts
    assert list(dict.fromkeys(part.split()[0] for part in parts)) == list(PART_COLOURS)


MIXTURE = "mixture.states=30", "mixture.cache=[1,2,3,5]", "mixture.counts=4"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, small_yaml, pattern) -> dict[str, Path]:
    """Trainings of a network and of no network, with a mixture."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "none.yaml").write_text("format: par-pattern/2\nblocks: []\n")
    for name, own in {"network": pattern, "none": folder / "none.yaml"}.items():
        succeed("retrain", own, small_yaml, "--run", folder / name, *MIXTURE)
    return {name: folder / name for name in ("network", "none")}


@pytest.mark.slow
def test_results_hold_the_network_and_the_mixture_and_scores_repeat_them(mixed, text_folder):
    test = (text_folder / "test.txt").read_text()
    for name, run in mixed.items():
        model, results = load_model(run), read_yaml(run / "results.yaml")
        score, corpus = model.score(test), Corpus(prepare(model.config.data))
        valid, mixture = corpus.tokens("valid"), load_mixture(run)
        mixture.fit(valid, *(model.read_network(valid) or (None, None)))
        np.testing.assert_allclose(mixture.gate, model.mixture.gate, rtol=1e-6)  # fitted to valid, not to test
        ids = corpus.tokens("test")
        _, shares = mixture.mix(mixture.look(ids, *(model.read_network(ids) or (None, None))))
        np.testing.assert_allclose(score.shares[1:], shares, atol=1e-6)
        sample = "".join(piece for piece, *_ in results["mixture"]["sample"])
        middle = 1 + (len(ids) - 1) // 2
        assert sample == "".join(model.tokenizer.decode(one[None]).decode() for one in ids[middle : middle + 200])
        assert score.metrics["nll"] == pytest.approx(results["test"]["nll"], rel=1e-6)
        assert results["test"]["nll_per_token"] < (3 if name == "none" else results["network"]["test"]["nll_per_token"])
        if name == "network":
            assert score.network.metrics["nll"] == pytest.approx(results["network"]["test"]["nll"], rel=1e-6)
            shown = succeed("score", run, text_folder / "test.txt")
            assert "of network, states, cache 1, cache 2, cache 3, cache 5, counts; the network alone has" in shown
        else:
            assert results["network"] is None and results["pattern"] == [] and score.network is None


@pytest.mark.slow
def test_lines_are_scored_by_themselves_and_greedy_text_is_the_most_probable(mixed):
    model, lines = load_model(mixed["network"]), ["the old man saw the small ship\n", "a red fox saw one crow\n"]
    together, apart = model.score("".join(lines), by_line=True), [model.score(f"\n{line}") for line in lines]
    np.testing.assert_allclose(together.nll, np.concatenate([one.nll[1:] for one in apart]))
    assert together.metrics["tokens"] == len(together.ids)  # so all bytes count
    streams = list(model.stream("the old", 5, Sampling(temperature=0), samples=2))
    assert all(one == other for one, other in streams)
    text = model.generate("the old", tokens=5, temperature=0)
    ids = model.tokenizer.encode(f"the old{text}")
    others = [model.score(model.tokenizer.decode(np.append(ids[:-1], other))).nll[-1] for other in range(6)]
    assert model.score(model.tokenizer.decode(ids)).nll[-1] <= min(others) + 1e-9


@pytest.mark.slow
def test_a_damaged_or_foreign_mixture_gets_one_line(mixed, tmp_path):
    def copy() -> Path:
        run = tmp_path / str(len([*tmp_path.iterdir()]))
        for file in mixed["network"].rglob("*"):
            if file.is_file() and "tensorboard" not in str(file):
                target = run / file.relative_to(mixed["network"])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        return run

    run = copy()
    (run / "mixture/counts.npz").write_bytes((run / "mixture/counts.npz").read_bytes()[:-4])
    with pytest.raises(InputError, match=r"counts.npz is missing or damaged: it is not the file of mixture.json"):
        load_mixture(run)
    assert load_mixture(mixed["network"])  # each run has its own files
    run = copy()
    settings = json.loads((run / "mixture/mixture.json").read_text())
    for edit in (
        {"gate": settings["gate"][:2]},
        {"gate": [["a"]]},
        {"bounds": [[0], [1]]},
        {"projection": settings["projection"][1:]},
        {"states": 0},
        {"counts": 3},
        {"cache": [1, 2, 3, 4]},
        {"vocab_size": 9},
        {"counts_sha256": None},
    ):
        (run / "mixture/mixture.json").write_text(json.dumps(settings | edit))
        with pytest.raises(InputError, match="damaged"):
            load_mixture(run)
    (run / "mixture/mixture.json").write_text(json.dumps(settings | {"vocabulary_sha256": "0"}))
    with pytest.raises(InputError, match="belongs to another vocabulary"):
        load_mixture(run)
    (run / "mixture/mixture.json").unlink()
    with pytest.raises(InputError, match=r"mixture.json is missing; remove .*results.yaml and continue the training"):
        load_mixture(run)
    file = run / "mixture/counts.npz"
    with np.load(mixed["network"] / "mixture/counts.npz") as content:
        packed = PackedCounts(**content)
    for edit in ({"children": packed.children[:-1]}, {"values": 2 * packed.values}, {"last": packed.last + 1}):
        file.write_bytes(packed._replace(**edit).to_bytes())
        with pytest.raises(InputError, match="it must hold counts of"):
            Counts.load(file, settings["vocab_size"])


@pytest.mark.slow
def test_the_code_of_the_onnx_card_mixes_in_numpy(mixed, monkeypatch):
    folder, model = mixed["network"], load_model(mixed["network"])
    records = read_yaml(folder / "results.yaml"), read_yaml(folder / "provenance.yaml")
    card = model_card(model, *records, "onnx", [])
    code = next(text for text in re.findall("```python\n(.*?)```", card, re.DOTALL) if "Stream" in text)
    monkeypatch.setattr("sys.path", [str(DISTRIBUTION.parent), *sys.path])
    names = {}
    exec(code.replace("FOLDER", str(folder)), names)
    stream, own = random_stream(300) + 20, names["stream"]
    log_p, hidden = network_of(stream, model.tokenizer.size, model.config.model.d_model)
    reader = Stream(model.mixture)
    for token, *network in zip(stream[:-1], log_p, hidden, strict=True):
        own.add(int(token), network[1])
        reader.read(np.array([token]), network[1][None])
        np.testing.assert_allclose(own.mix(network[0]), reader.predict(network[0]), rtol=1e-4, atol=1e-12)


@pytest.mark.slow
def test_lm_eval_judges_the_mixture(mixed):
    text = "the old man saw the small ship\n"
    for run in mixed.values():
        harness, score = Harness(run), load_model(run).score("\n" + text)
        rolling = harness.loglikelihood_rolling([SimpleNamespace(args=(text,))] * 2)  # each is a stream of its own
        assert rolling == [pytest.approx(-score.metrics["nll"], rel=1e-5)] * 2
        ((likely, _),) = harness.loglikelihood([SimpleNamespace(args=("the old", " man"))])
        assert likely == pytest.approx(-load_model(run).score("\nthe old man").nll[-1], rel=1e-5)


@pytest.mark.slow
def test_an_export_hands_the_mixture_on(mixed, tmp_path):
    text = "the old man saw the small ship\n"
    for name, run in mixed.items():
        succeed("export", run, "--out", tmp_path / name)
        own, exported = load_model(run).score(text), load_model(tmp_path / name).score(text)
        np.testing.assert_array_equal(own.nll, exported.nll)
        card = (tmp_path / name / "README.md").read_text()
        assert ("| network alone, test |" in card) == (name == "network") and "| mixture, test |" in card
    assert "without a network, so there is no graph" in refuse(
        "export", mixed["none"], "--format", "onnx", "--out", tmp_path / "graph"
    )


def test_the_predictor_without_a_network_has_not_seen_the_tokens_that_a_network_learns(corpus):
    """It would know random tokens by heart otherwise."""

    class Random(Corpus):
        def tokens(self, split):
            return np.random.default_rng(0).integers(V, size=4000)

    made, options = Random(corpus.folder), MixtureOptions(cache=[1, 2], counts=5)
    kept = corpus.folder / "train-nll-2-5-1-2.npy"
    kept.unlink(missing_ok=True)
    nll = train_nll(made, options)
    kept.unlink()
    assert nll.mean() > math.log(V) and len(nll) == 4000
    tokens, nodes, found = made.tokens("train"), np.full(5, -1, np.int64), np.zeros(4000)
    counts = pack(count_ngrams(tokens, made.vocab_size, 5)).unpack(made.vocab_size)
    read_counts(tokens, *counts, nodes, found, np.zeros((4000, 13), np.float32))
    assert -np.log(found).mean() < 0.6 * math.log(V)  # by counts of the same text


def test_a_network_learns_most_where_the_other_predictor_fails():
    nll = torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64, requires_grad=True)
    beside = torch.tensor([0.1, 3.0, 50.0], dtype=torch.float64)
    loss = residual_loss(nll, beside)
    even = [-math.log((math.exp(-3) + math.exp(-own)) / 2) for own in beside.tolist()]
    assert loss.tolist() == pytest.approx([(3 + own) / 2 for own in even])
    (slope,) = torch.autograd.grad(loss.sum(), nll)
    shares = [math.exp(-3) / (math.exp(-3) + math.exp(-own)) for own in beside.tolist()]
    assert slope.tolist() == pytest.approx([(1 + share) / 2 for share in shares])
    assert residual_loss(nll, None) is nll


def test_a_stream_of_two_tokens_can_be_fitted(corpus):
    mixture = open_mixture(MixtureOptions(), corpus, 0)
    tokens = corpus.tokens("valid")[:2]
    assert np.isfinite(mixture.fit(tokens, None, None)).all()
    assert np.isfinite(mixture.mix(mixture.look(tokens, None, None))[0]).all()
