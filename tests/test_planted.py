"""A search on a text whose best networks are known. experiments/planted has the results on four such texts."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.helpers import ArrayCorpus
from nas.core.config_loading import load_config
from nas.core.files import write_yaml
from nas.core.pattern import abbreviate, expand, interleaved
from nas.costs.flops import count_flops
from nas.search.space import NetworkCosts, make_network, within_budget
from nas.search.strategy import Strategy, successive_halving
from nas.search.trials import Trials
from nas.training.device import set_up_device
from tests.training import Training

VOCABULARY, KNOWN, SUFFICIENT = 48, "da", "d.*a"
OPTIONS = {
    "seed": 1,
    "data": {"tokenizer": "words"},
    "model": {
        "d_model": 16,
        "heads": 2,
        "d_ffn": 64,
        "blocks": 3,
        "dropout": 0,
        "tie_embeddings": True,
        "ngram_rows": [],
    },
    "train": {"steps": 800, "batch_size": 32, "segment": 16, "memory": 16, "warmup_steps": 20, "weight_decay": 0.02},
    "search": {"operations": ["attention", "dense", "identity"]},
    "mixture": {"states": 0, "cache": [], "counts": 0},
}


def mapped_tokens(length: int, seed: int) -> np.ndarray:
    """Nine tokens in ten are a random one of two maps of a random one of the four tokens before.

    The prediction is a mixture of their maps, and not a map of their mixture. So a dense block must map each token
    before attention mixes them. The embedding can make only one of two random maps linear.
    """
    maps = np.random.default_rng(99).permuted(np.tile(np.arange(VOCABULARY), (2, 1)), axis=1)
    source = np.random.default_rng(seed)
    tokens = source.integers(VOCABULARY, size=length)
    follows, which, back = source.random(length) < 0.9, source.integers(2, size=length), source.integers(1, 5, length)
    for position in range(4, length):
        if follows[position]:
            tokens[position] = maps[which[position], tokens[position - back[position]]]
    return tokens


@pytest.mark.slow
def test_a_search_finds_the_known_pattern_freely_and_within_its_cost(tmp_path):
    write_yaml(tmp_path / "planted.yaml", OPTIONS)
    config = load_config(tmp_path / "planted.yaml", ["train.threads=1"])
    corpus = ArrayCorpus(VOCABULARY, train=mapped_tokens(600_000, 1), valid=mapped_tokens(16_000, 2))
    runtime, known = set_up_device(config.seed, config.train), {}

    class TrialsHere(Trials):
        """Trials in this process. known: the trainings and figures of all searches."""

        def train(self, networks, share):
            for network in networks:
                if (network, share) not in known:
                    training, reached = known.get(network, (None, share))
                    if reached >= share:  # a training cannot go back
                        training = Training(list(network.blocks), config, corpus, runtime)
                    known[network, share], known[network] = {"valid": training.until(share)}, (training, share)
            return {network: known[network, share] for network in networks}

    sizes, table = (VOCABULARY, config.model.d_model), count_flops(config, corpus.counts())
    costs = NetworkCosts({sizes: table}, make_network(*sizes, interleaved(3)))
    own, everything = table.cost(expand(KNOWN)), itertools.product(("attention", "dense"), repeat=3)
    everything = [*everything, *itertools.product(("attention", "dense"), repeat=2), ("attention",), ("dense",)]
    cheap = [blocks for blocks in everything if within_budget(table, own)(blocks)]
    assert ("dense", "attention") in cheap and ("attention",) * 3 not in cheap
    for blocks, budget in ((everything, math.inf), (cheap, own / costs.reference_cost)):
        trials = TrialsHere(config, {VOCABULARY: corpus}, Path(), runtime)
        networks = [make_network(*sizes, one) for one in blocks]
        found = abbreviate(successive_halving(Strategy(trials, costs, budget, networks)).blocks)
        assert re.search(SUFFICIENT, found), (budget, found)
