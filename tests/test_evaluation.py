import argparse
import ast
import inspect
import math
import subprocess
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from models.operations import sparse
from models.operations.operation import BlockConfig
from models.transformer_xl import build_pattern
from nas.core.config import DataOptions
from nas.data.corpus import Corpus, prepare
from nas.data.sources import has_words
from nas.training.device import choose_runtime
from nas.training.evaluation import (
    count_memory_blocks,
    evaluate_split,
    period_of,
    perplexity,
    text_metrics,
    total_nll,
)
from tests.making import sized, supernet_of


class CountingModel(torch.nn.Module):
    """Gives target t an nll of 1 + t / 1024, which identifies its place. It also checks its inputs."""

    def read(self, tokens, memories, memory_length):
        return tokens[..., None], memories

    def head(self, hidden, targets):
        real = targets > 0
        assert (targets[real] == hidden[real, 0] + 1).all()
        return 1 + targets / 1024


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 64, 65, 101, 333])
@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize(
    ("segment", "memory", "looking_back"), [(8, 8, 3), (8, 5, 1), (4, 11, 2), (16, 0, 3), (500, 8, 2)]
)
def test_every_token_but_the_first_is_predicted_exactly_once(length, batch_size, segment, memory, looking_back):
    stream = np.arange(length)
    total, counted = total_nll(CountingModel(), stream, batch_size, segment, memory, looking_back)
    assert counted == length - 1
    assert total == pytest.approx(sum(1 + t / 1024 for t in range(1, length)), abs=1e-9)


@pytest.mark.parametrize("length", [9, 231])
@pytest.mark.parametrize(
    "pattern", [["attention", "dense", "attention", "attention"], ["linear", "attention"]], ids=str
)
@pytest.mark.parametrize("memory", [0, 3, 8, 20])
def test_figures_do_not_depend_on_the_batch_and_equal_a_plain_reading(memory, pattern, length):
    torch.manual_seed(0)
    model = build_pattern(sized(pattern), BlockConfig(16, dropout=0.5), 30).double()
    stream = torch.randint(30, (length,), generator=torch.Generator().manual_seed(2)).numpy()

    model.eval()
    plain, memories = 0.0, None
    for start in range(0, length - 1, 8):
        window = torch.from_numpy(stream[start : start + 9])[None]
        with torch.no_grad():
            nll, memories = model(window[:, :-1], window[:, 1:], memories, memory)
        plain += nll.sum().item()

    model.train()
    for batch_size in (1, 2, 7, 100):
        total, counted = total_nll(model, stream, batch_size, 8, memory, count_memory_blocks(model.blocks))
        assert counted == length - 1
        assert total == pytest.approx(plain, abs=1e-9)
    assert model.training


@pytest.mark.parametrize("memory", [0, 8])
@pytest.mark.parametrize(("options", "stride", "period"), [({}, 7, 7), ({"grid": [2, 5, 3]}, 5, 30)])
def test_rows_of_evaluation_begin_at_multiples_of_the_period(options, stride, period, memory, monkeypatch):
    """Fixed sparse attention and grid positions depend on the place in the stream. Results must not depend on the
    batch.
    """
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 0)
    torch.manual_seed(0)
    blocks = sized([f"sparse_fixed {stride}", "dense", "attention"])
    model = build_pattern(blocks, BlockConfig(16, relative=not options), 30, **options).double()
    stream = torch.randint(30, (331,), generator=torch.Generator().manual_seed(2)).numpy()
    metrics = [total_nll(model, stream, batch_size, 8, memory, 2, period)[0] for batch_size in (1, 2, 3, 5)]
    assert metrics[1:] == pytest.approx([metrics[0]] * 3, abs=1e-9)
    wrong = total_nll(model, stream, 5, 8, memory, 2, 1)[0]
    assert wrong != pytest.approx(metrics[0], abs=1e-6)


@pytest.mark.parametrize(("length", "segment", "memory", "looking_back", "period"), [
    (10_000, 100, 0, 0, 3072), (8193, 100, 100, 1, 3072), (331, 8, 8, 2, 30), (331, 8, 0, 0, 7), (50, 8, 8, 4, 1),
])  # fmt: skip
def test_evaluation_reads_no_segment_beyond_the_text(length, segment, memory, looking_back, period):
    steps = []

    class Counted(CountingModel):
        def read(self, tokens, *others):
            steps.append(len(tokens))
            return super().read(tokens, *others)

    for batch_size in (1, 8):
        steps.clear()
        total_nll(Counted(), np.arange(length), batch_size, segment, memory, looking_back, period)
        assert len(steps) <= -(-(length - 1) // segment)


def test_the_period_is_the_least_common_multiple_over_blocks():
    def blocks(*names):
        return build_pattern(sized(names), BlockConfig(16), 30).blocks

    strided = blocks("sparse_strided 6", "dense", "identity", "attention")
    assert period_of(strided) == 1 and period_of(strided, 10) == 10
    assert period_of(blocks("dense", "sparse_fixed 6"), 10) == 30
    assert period_of(blocks("sparse_fixed 6", "sparse_fixed 4"), 10) == 60
    supernet = supernet_of(2, ["attention", "sparse_fixed 6"], BlockConfig(16), 30)
    assert period_of(supernet.blocks) == 6


def test_a_stream_of_one_token_is_refused():
    with pytest.raises(ValueError, match="too short: evaluation needs at least two"):
        total_nll(CountingModel(), np.array([1]), 1, 8, 0, 0)


def test_word_and_byte_figures_refer_to_the_original_text(small_config, memory_corpus):
    corpus = memory_corpus(1000, np.arange(50), np.arange(101))
    corpus.meta["splits"]["valid"] |= {"words": 40, "bytes": 300, "words_kept": True}
    config = small_config("evaluate.batch_size=3")
    metrics = evaluate_split(config, CountingModel(), [], corpus, "valid", choose_runtime(config.train))
    nll = sum(1 + t / 1024 for t in range(1, 101))
    assert metrics["nll"] == pytest.approx(nll)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / 100))
    assert metrics["word_perplexity"] == pytest.approx(math.exp(nll / 40))
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / 300)
    assert metrics["word_perplexity_comparable"] and not metrics["bits_per_byte_comparable"]


PROSE = {
    "WikiText": "The <unk> , built in 1850 , is a two @-@ story church in the town , and it holds 1 @,@ 200 people .",
    "French": "L’été, aujourd'hui : « Où vas-tu ? », dit-il. Le nœud coûte 3 francs (environ).",
    "verses": "In the beginning God created\nthe heaven and the earth.\n\nAnd the earth\nwas [waste] and void;\n",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "Arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميرًا",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
}
OTHERS = {
    "Go": "func (r *Reader) Read(p []byte) (n int, err error) {\n\tif r.i >= len(r.s) {\n\t\treturn 0, io.EOF\n\t}\n",
    "markup": '<p class="soft">On test.</p>\n<td>{{ one.width }}</td><a href="#run-1">a run</a>\n',
    "table": "step=100 nll=4.25 lr=0.003\n3,7.2,net_1\n4,7.1,net_2\n",
    "Chinese": "人人生而自由,在尊严和权利上一律平等。\n我爱你\n今天天气好\n",
    "Japanese": "すべての人間は、生れながらにして自由である。\nありがとう\n",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระ\nขอบคุณ\n",
    "DNA": "ACGTTGCATGCATTACGATCGATTACGCATGCATGC\nGGCATTACGATGCATCGATCGATCGATTTACGATCA\n",
    "numbers": "1 2 3\n4 5 6\n",
}


@pytest.mark.parametrize("name", [*PROSE, *OTHERS])
def test_word_perplexity_is_of_words(name, tmp_path):
    """By train alone: other splits may be short, and bytes keep each text."""
    text = PROSE.get(name) or OTHERS[name]
    for split, own in {"train": text, "valid": text, "test": PROSE["verses"]}.items():
        (tmp_path / f"{split}.txt").write_text(own * 20)
    corpus = Corpus(prepare(DataOptions(source=str(tmp_path), tokenizer="bytes", cache=str(tmp_path))))
    for about in corpus.meta["splits"].values():
        metrics = text_metrics(10.0, 20, about)
        assert metrics["word_perplexity_comparable"] == (name in PROSE) and metrics["bits_per_byte_comparable"]


def test_the_source_of_a_program_is_no_prose():
    sources = b"".join(Path(module.__file__).read_bytes() for module in (ast, argparse, inspect, subprocess))
    assert not has_words(sources) and has_words("\n\n".join(topics.values()).encode())


def test_huge_losses_give_infinity_not_an_error():
    assert perplexity(1e4) == math.inf
