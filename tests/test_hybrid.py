import json
from types import SimpleNamespace

import pytest

from nas.core.errors import InputError
from tests.making import load_script


def run_script(monkeypatch, name, *arguments):
    script = load_script(f"hybrid/{name}")
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    script.main()


def test_each_document_of_the_recall_text_asks_for_all_its_pairs_in_another_order(tmp_path, monkeypatch):
    run_script(monkeypatch, "recall", tmp_path, "--pairs", 16, "--words", 30_000)
    sizes, values, orders = {}, {}, set()
    for split in ("train", "valid", "test"):
        for line in (tmp_path / f"{split}.txt").read_text().splitlines():
            words = line.split()
            pairs = list(zip(words[::2], words[1::2], strict=True))
            told, asked = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
            assert sorted(told) == sorted(asked) and len(dict(told)) == len(told)
            assert told != asked or len(told) == 4
            if len(told) == 4:
                orders.add(tuple(told.index(pair) for pair in asked))
            for key, value in told:
                values.setdefault(key, set()).add(value)
            sizes.setdefault(split, []).append(len(told))
    assert set(sizes["train"]) == {4, 8, 16}
    assert len(orders) == 24 and min(map(len, values.values())) > 10  # every order, and no value that fits a key
    words = {size: sizes["train"].count(size) * size * 4 for size in (4, 8, 16)}
    assert max(words.values()) <= 1.02 * min(words.values()) and sum(words.values()) == pytest.approx(30_000, rel=0.02)
    assert sum(sizes["valid"]) == pytest.approx(0.05 * sum(sizes["train"]), rel=0.05)


def test_a_recall_text_without_room_for_its_documents_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--words 100 must be at least 10240 with --pairs 32"):
        run_script(monkeypatch, "recall", tmp_path / "text", "--words", 100)
    assert not (tmp_path / "text").exists()


def test_the_library_text_holds_each_source_file_once_and_no_tests(tmp_path, monkeypatch):
    library = tmp_path / "library"
    left_out = ["test/t.py", "site-packages/s.py", "package/test/t.py", "encodings/e.py"]
    names = [f"m{index:02}.py" for index in range(25)] + left_out
    for name in names:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    run_script(monkeypatch, "library", tmp_path / "text")
    texts = {split: (tmp_path / "text" / f"{split}.txt").read_text() for split in ("train", "valid", "test")}
    assert [texts[split].count("\n") for split in ("train", "valid", "test")] == [22, 2, 1]
    lines = "".join(texts.values()).splitlines()
    assert lines != sorted(lines) and sorted(lines) == [f"# {name}" for name in names[:25]]


def test_the_order_of_the_supernet_is_compared_with_that_of_trainings_alone(tmp_path, monkeypatch, capsys):
    (alone := tmp_path / "comparison.csv").write_text("name,blocks,valid_nll_mean\nx,ad,3.1\ny,wd,3.2\nz,di,3.0\n")
    losses = {(0, 2): 4.0, (1, 2): 4.5, (2, 3): 4.2}  # ad, wd, di
    search = SimpleNamespace(operations=["attention", "window 128", "dense", "identity"])
    weights = SimpleNamespace(config=SimpleNamespace(search=search), nll=lambda path: losses[tuple(path)])
    monkeypatch.setattr("nas.search.shared_weights.load_shared_weights", lambda run: weights)
    run_script(monkeypatch, "supernet_order", "--search", tmp_path, "--alone", alone)
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows[2:] == ["| di | 3.0000 | 4.2000 |", "| ad | 3.1000 | 4.0000 |", "| wd | 3.2000 | 4.5000 |"]
    assert json.loads(last) == {"patterns": 3, "tau": 0.333}  # ad and di are in the wrong order
