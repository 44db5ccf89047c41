from pathlib import Path

import pytest

from nas.derivation import confidence_table, derive_argmax, doubts
from nas.errors import InputError
from nas.pattern import abbreviate, dump_pattern, interleaved, read_pattern

NAMES = ["attention", "dense", "identity"]
COSTS = {"output": 10.0, "blocks": {"attention": 6.0, "dense": 4.0, "identity": 0.0}}
CONFIG = {"model": {"d_model": 8}, "data": {"source": "x", "tokenizer": "bytes", "vocab_size": 3}}


def history(*rows):
    return [{"step": 7, "temperature": 0.1, "operations": NAMES, "pi": [list(row) for row in rows]}]


def test_a_hand_written_pattern_needs_two_keys(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("format: par-pattern/1\nblocks: [attention, dense, identity]\n")
    assert read_pattern(path)["blocks"] == NAMES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "format: par-pattern/1\nblocks: [attention, atention]\n",
            "block 2 is 'atention'; known operations are attention",
        ),
        ("format: par-pattern/1\nblocks: []\n", "at least one operation"),
        ("format: par-pattern/1\n", "at least one operation"),
        ("format: par-pattern/2\nblocks: [dense]\n", "format 'par-pattern/2'; this version reads 'par-pattern/1'"),
        ("blocks: [dense]\n", "is no pattern file"),
        ("dense\n", "is no pattern file"),
        ("format: [\n", "is not YAML"),
        ("format: 2020-99-99\n", "is not YAML"),
    ],
)
def test_bad_pattern_files_are_named(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_pattern(path)


def test_a_missing_pattern_file_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot read the pattern file"):
        read_pattern(tmp_path / "none.yaml")


def test_derive_takes_the_likeliest_and_says_how_sure_it_is(tmp_path):
    pattern = derive_argmax(history([0.7, 0.2, 0.1], [0.1, 0.2, 0.7]), CONFIG, COSTS)
    assert pattern["blocks"] == ["attention", "identity"]
    first = pattern["confidence"][0]
    assert first["margin"] == pytest.approx(0.5)
    assert first["entropy"] == pytest.approx(0.801819, abs=1e-6)
    assert pattern["flops_per_token"] == 16
    assert pattern["flops_ratio_to_interleaved"] == pytest.approx(16 / 20)
    assert doubts(pattern) == []
    path = tmp_path / "pattern.yaml"
    path.write_text(dump_pattern(pattern))
    assert read_pattern(path) == pattern
    table = confidence_table(pattern).splitlines()
    assert len(table) == 3 and "0.700" in table[1] and "identity" in table[2]


def test_ties_and_near_uniform_blocks_are_said_loudly():
    pattern = derive_argmax(history([0.4, 0.4, 0.2], [0.36, 0.32, 0.32], [0.9, 0.05, 0.05]), CONFIG, COSTS)
    found = doubts(pattern)
    assert len(found) == 2
    assert "block 1 is a TIE between attention and dense" in found[0]
    assert "block 2 is UNDECIDED: attention leads dense by only 0.040" in found[1]


def test_one_candidate_leaves_no_doubt():
    lines = [{"step": 1, "temperature": 1, "operations": ["dense"], "pi": [[1.0]]}]
    assert doubts(derive_argmax(lines, CONFIG, COSTS)) == []


def test_the_patterns_of_the_literature():
    folder = Path(__file__).parents[1] / "experiments" / "patterns"
    blocks = {path.stem: read_pattern(path)["blocks"] for path in folder.glob("*.yaml")}
    assert {"interleaved", "sandwich", "par", "dense-only", "attention-only"} <= blocks.keys()
    assert blocks["interleaved"] == interleaved(len(blocks["interleaved"]))
    assert set(blocks["dense-only"]) == {"dense"} and set(blocks["attention-only"]) == {"attention"}
    sandwich = abbreviate(blocks["sandwich"])
    assert (
        sandwich == "a" * 6 + "ad" * 10 + "d" * 6
    )  # s^k (sf)^(n-k) f^k: 32 blocks, sandwiching coefficient 6, as in arXiv 1911.03864
    par = abbreviate(blocks["par"])
    assert len(par) == 32 and par[22:].count("a") == 0  # attention in the first two thirds alone
    assert par.count("a") == 32 // 5 or par.count("a") == -(-32 // 5)  # one block in five
