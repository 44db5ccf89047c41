from pathlib import Path

import pytest
import yaml

from nas.comparison.spec import Contender, given_contenders, is_random_of, read_settings
from nas.core.errors import InputError

GOOD = {"format": "par-comparison/1", "retrain": "r.yaml", "search": "s.yaml"}


@pytest.fixture
def written(tmp_path):
    def write(**changed) -> Path:
        path = tmp_path / "comparison.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in (GOOD | changed).items() if v is not None}))
        return path

    return write


def test_paths_are_relative_to_the_file_and_the_command_line_wins(written, tmp_path):
    settings = read_settings(written(random=5, seeds=[4, 5]), {"random": 2, "seeds": [9]})
    assert (settings.retrain, settings.search) == (tmp_path / "r.yaml", tmp_path / "s.yaml")
    assert (settings.random, settings.seeds, settings.search_seeds) == (2, [9], [1])
    assert settings.seeds_of("given") == settings.seeds_of("random") == [9]
    assert read_settings(written(random_seeds=[7]), {}).seeds_of("random") == [7]


def test_names_of_contenders_that_depend_on_a_search(written):
    settings = read_settings(written(budgets=[1.0, 0.65], random=2), {})
    random = {"searched-0.65": ["random-0.65-1", "random-0.65-2"], "searched-1": ["random-1-1", "random-1-2"]}
    assert list(settings.searched.items()) == [("searched-0.65", 0.65), ("searched-1", 1.0)]  # lowest budget first
    drawn = dict.fromkeys((name for names in random.values() for name in names), "random")
    assert settings.derived_names == dict.fromkeys(random, "searched") | drawn
    without = read_settings(written(random=1), {}).derived_names
    assert without == {"searched": "searched", "random-1": "random"}
    for searched, own in {**random, "searched": ["random-1"]}.items():
        assert [n for n in {**settings.derived_names, **without} if is_random_of(n, searched)] == own


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"format": "par-pattern/1"}, "is not a comparison: it needs `format: par-comparison/1`"),
        ({"sedes": [1]}, "unknown key 'sedes'; the nearest is 'seeds'"),
        ({"retrain": None}, "retrain=None must be the name of a configuration file"),
        ({"search": 5}, "search=5 must be the name of a configuration file"),
        ({"seeds": []}, "seeds=[] must be different whole numbers"),
        ({"random_seeds": [1, 1]}, "random_seeds=[1, 1] must be different"),
        ({"search_seeds": [True]}, "search_seeds=[True] must be"),
        ({"seeds": 3}, "seeds=3 must be"),
        ({"budgets": [0]}, "budgets=[0] must be different ratios"),
        ({"budgets": [0.33333]}, "of at most 4 decimals"),
        ({"patterns": [""]}, "patterns=[''] must be different names"),
        ({"random": -1}, "random=-1 must be a whole number from 0"),
        ({"search": None, "patterns": []}, "patterns=[] and no search leave nothing to compare"),
        *(({"search": None, key: [1]}, f"{key} needs a search") for key in ("search_seeds", "budgets")),
    ],
)
def test_a_wrong_file_gives_one_line(written, changed, words):
    with pytest.raises(InputError) as error:
        read_settings(written(**changed), {})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_given_contenders_are_rules_and_files_with_different_names(written, small_config, tmp_path):
    recipe = small_config()
    (tmp_path / "a").mkdir()
    blocks = ["dense", "identity", "dense", "dense"]
    for file in ("mine.yaml", "a/par.yaml", "searched.yaml", "$x^$.yaml", "short.yaml", "wide.yaml"):
        content = {"format": "par-pattern/2", "blocks": blocks[:1] if file == "short.yaml" else blocks}
        content |= {"d_model": 32 if file == "wide.yaml" else recipe.model.d_model}
        (tmp_path / file).write_text(yaml.safe_dump(content))
    path = written(patterns=["interleaved", "mine.yaml"])
    given = [Contender("interleaved", "given", ["attention", "dense"] * 2), Contender("mine", "given", blocks)]
    assert given_contenders(read_settings(path, {}), path, 4, recipe) == given
    for patterns, words in (
        (["interleavd"], r"neither a file nor one of .* the nearest is 'interleaved'"),
        (["par", "a/par.yaml"], "two patterns are called 'par'"),
        (["searched.yaml"], "two patterns are called 'searched'"),
        (["short.yaml"], "has 1 blocks, but model.blocks is 4"),
        (["wide.yaml"], "has d_model=32, but model.d_model is [0-9]+; they must match"),
        (["$x^$.yaml"], "must begin with a letter or digit"),
        (["missing.yaml"], "cannot read the pattern file"),
    ):
        path = written(patterns=patterns)
        with pytest.raises(InputError, match=words):
            given_contenders(read_settings(path, {}), path, 4, recipe)
