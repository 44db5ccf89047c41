import random
from contextlib import suppress

import pytest

from models.operations.registry import OPERATIONS
from nas.core.errors import InputError
from nas.core.pattern import (
    abbreviate,
    abbreviate_network,
    expand,
    file_name,
    parse_block,
    read_pattern,
    resolve_block,
    simplify_block,
    spell_block,
    unit_of,
)
from tests.making import shape_of

NAMES = ["attention", "dense", "identity"]


def test_a_hand_written_pattern_needs_two_keys(pattern):
    assert read_pattern(pattern)["blocks"] == NAMES


def random_block(source: random.Random) -> tuple[str, dict[str, str]]:
    """An operation with some of its sizes."""
    name = source.choice(list(OPERATIONS))
    given = {}
    for key, size in OPERATIONS[name].sizes.items():
        number = str(source.choice([1, 2, 9, 16, 250]))
        if source.random() < 0.6:
            given[key] = source.choice([number, f"{number}x", f"{number}.5x"]) if size.multiple else number
    return name, given


def test_short_forms_with_and_without_spaces_expand_to_the_same_blocks():
    source, seen = random.Random(0), {}
    for _ in range(2000):
        blocks = [spell_block(*random_block(source)) for _ in range(source.randint(1, 6))]
        assert expand(abbreviate(blocks)) == blocks == expand(file_name(blocks))
        assert seen.setdefault(file_name(blocks), blocks) == blocks
    assert [abbreviate(NAMES), abbreviate_network(NAMES), abbreviate_network(["identity"])] == ["adi", "ad", "none"]
    sized = ["attention heads=2 key_heads=1", "dense 8x", "identity", "window 32 heads=2", "dense"]
    assert abbreviate(sized) == "ah2k1 d8x i w32h2 d" and abbreviate_network(sized) == "ah2k1 d8x w32h2 d"


def test_a_size_stays_if_the_others_do_not_fit_its_default():
    assert simplify_block("sparse_fixed 32 summary=20", shape_of(segment=32, keys=64)) == "sparse_fixed 32 summary=20"
    assert simplify_block("sparse_fixed 8 summary=4", shape_of(segment=32, keys=64)) == "sparse_fixed"


def test_all_spellings_of_a_block_mean_the_same():
    """A string with sizes in any order, a mapping, and a unit. The usual spelling has no size that is the default."""
    source, shape, shortened = random.Random(1), shape_of(64, heads=16, d_ffn="4x", segment=250, keys=500), 0
    for _ in range(500):
        name, given = random_block(source)
        words = [f"{key}={value}" for key, value in given.items()]
        source.shuffle(words)
        spellings = [" ".join([name, *words]), {name: given}, spell_block(name, given)]
        spellings.append(unit_of(spellings[-1]))
        main = [key for key, size in OPERATIONS[name].sizes.items() if not size.letter]
        if [*given] == main != []:
            spellings += [{name: given[main[0]]}, f"{name} {given[main[0]]}"]
        assert all(parse_block(spelling) == (name, given) for spelling in spellings)
        try:
            sizes = resolve_block(spellings[0], shape)
        except InputError:
            continue
        usual = simplify_block(spellings[0], shape)
        assert resolve_block(usual, shape) == sizes and all(simplify_block(one, shape) == usual for one in spellings)
        for key in (left := parse_block(usual)[1]):
            others = spell_block(name, {other: value for other, value in left.items() if other != key})
            with suppress(InputError):  # the others do not fit the default
                assert resolve_block(others, shape) != sizes
        shortened += len(left) < len(given)
    assert shortened > 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: par-pattern/2\nblocks: [attention, atention]\n", "block 2: 'atention' is no operation; known op"),
        ("format: par-pattern/2\nblocks: [dense 8y]\n", "block 1: dense 8y: d_ffn=8y must be a whole number from"),
        ("format: par-pattern/2\n", "a list of blocks"),
        ("format: par-pattern/2\nblocks: [dense]\nd_model: 0\n", "d_model=0 must be a whole number from 1"),
        ("format: par-pattern/1\nblocks: [dense]\n", "bad.yaml needs `format: par-pattern/2`"),
        ("blocks: [dense]\n", "bad.yaml needs `format"),
        ("dense\n", "bad.yaml needs `format"),
        ("format: par-pattern/2\nblocks: [dense]\nd_modell: 8\n", "unknown key 'd_modell'; the nearest is 'd_model'"),
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
    with pytest.raises(InputError, match=r"cannot read the pattern file .*: it does not exist; a pattern file needs"):
        read_pattern(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a folder: give a pattern file, which needs `format: par-pattern/2` and"):
        read_pattern(tmp_path)
    (tmp_path / "pattern.yaml").touch()
    with pytest.raises(InputError, match=f"is a folder: give {tmp_path / 'pattern.yaml'}$"):
        read_pattern(tmp_path)
    (tmp_path / "pattern.yaml").unlink()
    (tmp_path / "pi.jsonl").touch()
    with pytest.raises(InputError, match=f"derive the pattern first: python derive.py {tmp_path}"):
        read_pattern(tmp_path / "pattern.yaml")
