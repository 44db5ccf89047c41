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


def test_small_to_large_compares_the_order_of_patterns_at_two_sizes(text_folder, cache, tmp_path, monkeypatch, capsys):
    rows = ["interleaved,ad", "searched-0.4,ld", "same-network,adi", "random-0.4-2,wd", "random-0.4-3,dd"]
    lines = ["name,blocks,valid_nll_mean", *(f"{row},{3.2 + index}" for index, row in enumerate(rows))]
    (small := tmp_path / "comparison.csv").write_text("\n".join(lines))
    options = [f"data.source={text_folder}", f"data.cache={cache}", "data.tokenizer=words", "data.vocab_size=null"]
    options += ["model.d_model=16", "model.d_ffn=16", "train.steps=2", "train.segment=8", "train.memory=8"]
    options += ["model.window=4", "train.threads=null"]
    run_script(monkeypatch, "small_to_large", "--small", small, "--out", tmp_path / "out", *options)
    output = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in output if line.startswith("| ")][1:]
    assert [row[:3] for row in rows] == [  # best first; equal networks count once; random-0.4-3 is left out
        ["interleaved", "ad", "3.2000"],
        ["searched-0.4", "ld", "4.2000"],
        ["random-0.4-2", "wd", "6.2000"],
    ]
    assert rows[0][5] == rows[0][4]  # interleaved of the larger depth is interleaved, stacked
    summary = json.loads(output[-1])
    for column, by in enumerate(("stretch", "stack"), start=3):
        large = [float(row[column].split(" ± ")[0]) for row in rows]
        tau = sum(1 if large[i] < large[j] else -1 for i, j in ((0, 1), (0, 2), (1, 2))) / 3
        assert summary[by].keys() == {"all", "0.4"} and summary[by]["0.4"]["patterns"] == 2
        assert summary[by]["all"]["tau"] == pytest.approx(tau, abs=1e-3)
        assert summary[by]["all"]["regret"] == pytest.approx(large[0] - min(large), abs=2e-4)
        assert summary[by]["all"]["noise"] > 0
    trained = sorted(json.loads(file.read_text())["pattern"] for file in (tmp_path / "out").glob("*-*.json"))
    assert trained == sorted(3 * ["aadd", "lldd", "wwdd", "adad", "ldld", "wdwd"])


def test_small_to_large_names_a_file_that_is_no_comparison(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"is not a comparison\.csv; python -m nas.compare writes one"):
        run_script(monkeypatch, "small_to_large", "--small", tmp_path, "--out", tmp_path / "out")


def test_the_order_of_the_supernet_is_compared_with_that_of_trainings_alone(tmp_path, monkeypatch, capsys):
    (alone := tmp_path / "comparison.csv").write_text("name,blocks,valid_nll_mean\nx,ad,3.1\ny,wd,3.2\nz,di,3.0\n")
    losses = {(0, 2): 4.0, (1, 2): 4.5, (2, 3): 4.2}  # ad, wd, di
    search = SimpleNamespace(operations=["attention", "window", "dense", "identity"])
    weights = SimpleNamespace(config=SimpleNamespace(search=search), nll=lambda path: losses[tuple(path)])
    monkeypatch.setattr("nas.search.shared_weights.load_shared_weights", lambda run: weights)
    run_script(monkeypatch, "supernet_order", "--search", tmp_path, "--alone", alone)
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows[2:] == ["| di | 3.0000 | 4.2000 |", "| ad | 3.1000 | 4.0000 |", "| wd | 3.2000 | 4.5000 |"]
    assert json.loads(last) == {"patterns": 3, "tau": 0.333}  # ad and di are in the wrong order
