from pathlib import Path

import pytest

from nas.core.errors import InputError
from nas.core.pattern import abbreviate, interleaved, read_pattern

NAMES = ["attention", "dense", "identity"]


def test_a_hand_written_pattern_needs_two_keys(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("format: par-pattern/1\nblocks: [attention, dense, identity]\n")
    assert read_pattern(path)["blocks"] == NAMES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: par-pattern/1\nblocks: [attention, atention]\n", "block 2 is 'atention'; known operations are"),
        ("format: par-pattern/1\nblocks: []\n", "at least one operation"),
        ("format: par-pattern/1\n", "at least one operation"),
        ("format: par-pattern/2\nblocks: [dense]\n", "is not a pattern file: it needs `format: par-pattern/1`"),
        ("blocks: [dense]\n", "is not a pattern file"),
        ("dense\n", "is not a pattern file"),
        ("format: [\n", "is not YAML"),
        ("format: 2020-99-99\n", "is not YAML"),
    ],
)
def test_bad_pattern_files_are_reported(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_pattern(path)


def test_a_missing_pattern_file_is_reported(tmp_path):
    with pytest.raises(InputError, match="cannot read the pattern file"):
        read_pattern(tmp_path / "none.yaml")
    with pytest.raises(InputError, match=r"cannot read the pattern file .*: Is a directory"):
        read_pattern(tmp_path)
    (tmp_path / "pi.jsonl").touch()
    with pytest.raises(InputError, match=f"derive the pattern first: python derive.py {tmp_path}"):
        read_pattern(tmp_path / "pattern.yaml")


def test_the_patterns_of_the_literature():
    folder = Path(__file__).parents[1] / "experiments" / "patterns"
    blocks = {path.stem: read_pattern(path)["blocks"] for path in folder.glob("*.yaml")}
    assert {"interleaved", "sandwich", "par", "dense-only", "attention-only"} <= blocks.keys()
    assert blocks["interleaved"] == interleaved(len(blocks["interleaved"]))
    assert set(blocks["dense-only"]) == {"dense"} and set(blocks["attention-only"]) == {"attention"}
    sandwich = abbreviate(blocks["sandwich"])
    # s^k (sf)^(n-k) f^k: 32 blocks, sandwiching coefficient 6, as in arXiv 1911.03864
    assert sandwich == "a" * 6 + "ad" * 10 + "d" * 6
    par = abbreviate(blocks["par"])
    assert len(par) == 32 and par[22:].count("a") == 0  # attention only in the first two thirds
    assert par.count("a") == 32 // 5 or par.count("a") == -(-32 // 5)  # one block in five
