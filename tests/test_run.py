"""All stages in one command."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nas.comparison.found_and_usual import aligned, best_without_network, row_of
from nas.core.config_loading import load_config
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import abbreviate
from nas.data.corpus import Corpus, prepare
from nas.reporting.page import trained_networks
from nas.run import generated_rows
from tests.processes import refuse, run, start, succeed, wait_for

pytestmark = pytest.mark.slow
OPTIONS = [
    *("search.method=trials", "data.tokenizer=bpe", "data.vocab_size=310", "search.vocab_size=[300,310]"),
    *("mixture.cache=[1,2]", "mixture.counts=3"),
    *("search.latency.source=flops", "search.latency.target=0.9", "search.operations=[attention,dense,identity]"),
]


def check_table(shown, summary):
    """The last lines have a row for each predictor, whose figures are those of the whole predictor on test."""
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("on test "))
    head, rows = lines[start], lines[start + 1 : start + 4]
    columns = ["bits per byte", "network alone", "word perplexity", "ms for 1,000 bytes"]
    ends = [head.index(column) + len(column) for column in columns]
    for name, row in zip(("found", "usual", "no-network"), rows, strict=True):
        own, cells = summary[name], [row[: ends[0]].split()[-1], *(row[:end].split()[-1] for end in ends[1:])]
        ms = own["ms_per_1000_bytes"] + own.get("mixture_ms_per_1000_bytes", 0)
        assert row.startswith(name.replace("-", " ")) and cells[0] == f"{own['bits_per_byte']:.4f}"
        assert cells[2:] == [f"{own['word_perplexity']:,.1f}", f"{ms:.3g}"]
        what = "cache and counts alone"
        if "blocks" in own:
            what = f"width {own['d_model']}, {abbreviate(own['blocks'])}"
            assert cells[1] == f"{own['network_bits_per_byte']:.4f}"
        assert row[ends[-1] :] == f"  {own['vocab_size']} pieces, {what}"


def check_generated_text(folder, shown, summary):
    """The rows are what the model to use writes after the end of valid, with a fixed seed."""
    rows = summary["text"]
    assert 1 <= len(rows) <= 4 and all(0 < len(row) <= 110 for row in rows)
    assert "".join(f"  {row}\n" for row in rows) in shown
    corpus = Corpus(prepare(load_config(folder / "run.yaml", []).data))
    last = corpus.vocabulary.decode(corpus.tokens("valid")[-200:]).decode()
    again = "--prompt", last, "--top-p", 0.95, "--seed", 1, "--tokens", 500, "--lines", 12
    written = succeed("generate", folder / summary["use"], *again).removeprefix(last)
    assert " ".join(written.split()).startswith(" ".join(" ".join(rows).split()))


def check_best_without_network(folder):
    """Of two vocabularies the best one is chosen: the other gives cache and counts alone more bits on valid."""
    own, pattern = read_yaml(folder / "no-network" / "results.yaml"), read_yaml(folder / "no-network.yaml")
    assert best_without_network(load_config(folder / "run.yaml", []), {300, 310}) == pattern
    write_yaml(folder / "other.yaml", pattern | {"vocab_size": {300: 310, 310: 300}[pattern["vocab_size"]]})
    succeed("retrain", folder / "other.yaml", folder / "run.yaml", "--run", folder / "other")
    assert read_yaml(folder / "other" / "results.yaml")["valid"]["bits_per_byte"] > own["valid"]["bits_per_byte"]


def check_report(folder, summary, percent):
    """The report begins with the answer. percent: bits per byte of the found network against the usual one."""
    page = (folder / "report.html").read_text()
    answer = page[page.index("<h2>The answer</h2>") : page.index('<h2 id="run-1">')]
    assert f"differs from the usual one by {percent:+.1f}% bits per byte" in answer and "quality over cost" in answer
    assert "quality over cost" not in page[page.index('<h2 id="run-1">') :] and (folder / "search" / "pi.gif").exists()
    assert f"python -m nas.run {folder / 'run.yaml'} --run NEW_FOLDER</pre>" in page
    # No candidate, a remark about other searches, and an option that a new folder refuses
    unwanted = ["sparse_strided", "only the weights train", " --resume"]
    assert "identity" in page and not [text for text in unwanted if text in page]
    drawn = trained_networks([folder / name for name in ("found", "usual")], 3.0)
    expected = {name: 3 * summary[name]["time_ratio_to_reference"] for name in ("found", "usual")}
    assert {name.split(":")[0]: time for name, time, _ in drawn} == expected


def check_repeated(folder, whole, shown, summary):
    """A repeated command prints the same last lines, and generates no text again; lost weights are made again."""
    last = shown[shown.index("\non test ") :]
    assert succeed("run", *whole).endswith(last[1:])
    write_yaml(folder / "summary.yaml", summary | {"text": ["kept, not generated again"]})
    assert "\n  kept, not generated again\nreport" in succeed("run", *whole)
    (folder / "found" / "best.pt").unlink()
    before = yaml.safe_load((folder / "found" / "results.yaml").read_text())
    succeed("run", *whole)
    again = yaml.safe_load((folder / "found" / "results.yaml").read_text())
    assert again["valid"] == before["valid"] and again["train_steps"] == before["train_steps"]
    assert "best.pt is missing; the weights of the last step replace it" in (folder / "logs" / "found.txt").read_text()
    assert succeed("generate", folder / "found", "--prompt", "the", "--tokens", 3).startswith("the")


def check_a_better_usual_network(folder, whole, found):
    """found: its bits per byte on valid."""
    results = yaml.safe_load((folder / "usual" / "results.yaml").read_text())
    results["valid"]["bits_per_byte"] = found / 2
    write_yaml(folder / "usual" / "results.yaml", results)
    for name in ("summary.yaml", "report.html"):
        (folder / name).unlink()
    shown = succeed("run", *whole)
    assert "NOTICE: the usual network is better on valid" in shown and "its noise" not in shown
    assert f"to use: {folder / 'usual'}\n" in shown
    assert "<strong>The usual network is better on valid" in (folder / "report.html").read_text()


def test_the_whole_fits_the_minutes_and_goes_on_after_a_stop_and_a_kill(tmp_path, small_yaml):
    folder = tmp_path / "run"
    whole = small_yaml, "--run", folder, "--minutes", 3, *OPTIONS
    for made, number in (("search/trials/*/trial-*.yaml", signal.SIGINT), ("found/checkpoint.pt", signal.SIGKILL)):
        process = start("run", *whole)
        wait_for(lambda made=made: list(folder.glob(made)), process)
        process.send_signal(number)
        _, told = process.communicate()
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "what has finished is kept: repeat the command to continue" in told and "--resume" not in told
    plan = yaml.safe_load((folder / "run.yaml").read_text())
    assert 0.5 < plan["train"]["epochs"] <= 3 and plan["train"]["steps"] is None
    assert "search.latency.target (0.9 -> 0.8)" in refuse("run", *whole, "search.latency.target=0.8")
    assert "train.lr (0.003 -> 0.1)" in refuse("run", *whole, "train.lr=0.1")
    assert "was begun with --minutes 3: repeat the command so" in refuse("run", *whole, "--minutes", 2)
    shown = succeed("run", *whole)
    summary = yaml.safe_load((folder / "summary.yaml").read_text())
    for name in ("found", "usual"):
        own, results = summary[name], yaml.safe_load((folder / name / "results.yaml").read_text())
        assert own["bits_per_byte"] == results["test"]["bits_per_byte"] and own["blocks"] == results["pattern"]
        assert own["dropout"] == 0.1
    valid = {name: yaml.safe_load((folder / name / "results.yaml").read_text())["valid"] for name in ("found", "usual")}
    best = "usual" if 1.001 * valid["usual"]["bits_per_byte"] < valid["found"]["bits_per_byte"] else "found"
    counted = yaml.safe_load((folder / "no-network" / "results.yaml").read_text())
    noise = 0.8 / valid["found"]["tokens"] ** 0.5
    if counted["valid"]["bits_per_byte"] <= (1 + max(0.001, noise)) * valid[best]["bits_per_byte"]:
        best = "no-network"
    assert summary["use"] == best and shown.endswith(f"; the model to use: {folder / best}\n")
    check_table(shown, summary)
    check_generated_text(folder, shown, summary)
    check_best_without_network(folder)
    assert summary["usual"]["blocks"] == ["attention", "dense"] and summary["usual"]["time_ratio_to_usual"] == 1
    percent = 100 * (summary["found"]["bits_per_byte"] / summary["usual"]["bits_per_byte"] - 1)
    alone = 100 * (summary["found"]["network_bits_per_byte"] / summary["usual"]["network_bits_per_byte"] - 1)
    assert f"found against usual: {percent:+.1f}% bits per byte (networks alone: {alone:+.1f}%), at " in shown
    assert "Which part predicted each token" in (folder / "report.html").read_text()
    assert " of the reference's time\n" in shown
    assert "next: python" not in shown  # it runs the next stages itself
    lead = abs(valid["found"]["bits_per_byte"] / valid["usual"]["bits_per_byte"] - 1)
    assert ("differ by less than its noise" in shown) == (lead < noise)
    assert "going on from the trial" in (folder / "logs" / "found.txt").read_text()
    check_report(folder, summary, percent)
    check_repeated(folder, whole, shown, summary)
    check_a_better_usual_network(folder, whole, valid["found"]["bits_per_byte"])


def test_text_without_words_and_without_a_mixture_has_fewer_columns():
    found = {"bits_per_byte": 1.5926, "word_perplexity": 4336.4, "word_perplexity_comparable": False}
    found |= {"network_bits_per_byte": 1.5926, "ms_per_1000_bytes": 2.56, "mixture_ms_per_1000_bytes": 0.4}
    found |= {"vocab_size": 8000, "d_model": 64, "blocks": ["window", "dense 8x"]}
    usual = found | {"vocab_size": 256, "ms_per_1000_bytes": 12.34, "blocks": ["dense"]}
    assert aligned([row_of("found", found), row_of("usual", usual)]) == [
        "on test  bits per byte  ms for 1,000 bytes  what it is",
        "found           1.5926                2.96  8,000 pieces, width 64, w d8x",
        "usual           1.5926                12.7  256 pieces, width 64, d",
    ]


def test_rows_of_generated_text_suit_a_terminal(monkeypatch, small_config):
    texts = ["", "\n \n\tif x {\x1b[2J\n" + "many words " * 30 + "\n    end\n"]
    model = SimpleNamespace(generate=lambda *_, **__: texts.pop(0))
    monkeypatch.setattr("nas.load_model", lambda *_: model)
    assert generated_rows(Path("run"), small_config()) == []
    first, *others = generated_rows(Path("run"), small_config())
    assert first == r"\tif x {\x1b[2J" and [len(row) for row in others] == [109, 109, 109]
    assert " ".join(others).split() == ["many", "words"] * 30


def test_a_space_of_one_network_has_a_report_too(tmp_path, small_yaml):
    """pi never changes. The found network is the usual one, and the reference."""
    options = [*OPTIONS, "search.operations=[attention,dense]", "search.vocab_size=[]", "search.latency.target=2"]
    options += ["model.dropout=auto", "model.blocks=1", "train.steps=20"]
    options += ["data.tokenizer=bytes", "data.vocab_size=null"]
    shown = succeed("run", small_yaml, "--run", tmp_path / "run", *options)
    summary = yaml.safe_load((tmp_path / "run" / "summary.yaml").read_text())
    assert summary["found"]["dropout"] == 0  # that of the training, not auto
    assert summary["usual"]["time_ratio_to_reference"] > 1  # by what is mixed with it
    assert "found against usual (the reference): +0.0% bits per byte (networks alone: +0.0%), at " in shown
    assert summary["use"] != "usual"  # it is not better
    assert "vocab_size" not in read_yaml(tmp_path / "run" / "no-network.yaml")  # bytes have one vocabulary
    assert summary["found"]["blocks"] == summary["usual"]["blocks"] == ["attention"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "differs from the usual one by +0.0% bits per byte" in page


def test_a_refused_start_does_not_fix_the_configuration(tmp_path, small_yaml):
    folder = tmp_path / "run"
    whole = small_yaml, "--run", folder, *OPTIONS
    refused = refuse("run", *whole)
    assert "search.vocab_size needs train.epochs instead of train.steps" in refused and not folder.exists()
    free = refuse("run", *whole, "search.latency.source=none")
    assert "search.latency.target=0.9 needs search.latency.source=measured, or flops" in free
    assert "is a ratio to the reference: give at most 10" in refuse("run", *whole, "search.latency.target=80")
    failed = run("run", *whole, "train.epochs=0.2", "search.latency.target=0.01")
    assert failed.returncode == 1 and "error: no network is within search.latency.target=0.01" in failed.stderr
    assert "--minutes 0.01 is too short" in succeed("run", *whole, "search.latency.target=0.8", "--minutes", 0.01)
    costs = folder / "search" / "trials" / "costs.yaml"  # the next call may have other sizes
    assert costs.exists()
    again = run("run", *whole, "train.epochs=0.2", "search.latency.target=0.01")
    assert again.stderr == failed.stderr and not costs.exists()


def test_too_few_minutes_and_a_strange_folder_are_refused(tmp_path, small_yaml):
    again, counted = (small_yaml, "--run", tmp_path / "run", "--minutes", 0.05, *OPTIONS), "run/no-network"
    shown = succeed("run", *again)
    assert "NOTICE: no network was searched: --minutes 0.05 is too short for this text" in shown
    assert f"the model to use has only cache and counts: {tmp_path / counted}\n" in shown
    results = yaml.safe_load((tmp_path / counted / "results.yaml").read_text())
    assert f"test: perplexity {results['test']['perplexity']:.2f} per token" in shown and results["pattern"] == []
    assert succeed("generate", tmp_path / counted, "--prompt", "the", "--tokens", 3).startswith("the")
    message = refuse("run", small_yaml, "--run", tmp_path / "alone", "--minutes", 0.05, *OPTIONS, "mixture.counts=0")
    assert "--minutes 0.05 is too short for this text and device: give at least " in message
    estimate = tmp_path / "run" / "search" / "trials" / "estimate.yaml"
    measured = estimate.read_text()
    assert "is too short" in succeed("run", *again) and estimate.read_text() == measured  # it is kept,
    succeed("run", *again, "train.batch_size=8")
    assert yaml.safe_load(estimate.read_text())["about"]["train"]["batch_size"] == 8  # but not for other options
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text("a few words of a text that is too short\n" * 3)
    short = f"data.source={tmp_path / 'text'}", "train.batch_size=32", "data.tokenizer=bytes", "data.vocab_size=null"
    short = "--minutes", 1, *OPTIONS, *short, "search.vocab_size=[]"
    message = refuse("run", small_yaml, "--run", tmp_path / "short", *short)
    assert "the train stream has" in message  # not the held-out one, which only the paper's method reads
    assert "tokens: too short for train.batch_size=32 rows of" in message
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "run.yaml").touch()
    nearest = f"nowere does not exist; the nearest run is {tmp_path / 'nowhere'}; without --resume a new run starts"
    assert nearest in refuse("run", small_yaml, "--run", tmp_path / "nowere", "--resume")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    message = refuse("run", small_yaml, "--run", tmp_path / "mine", "train.epochs=1", *OPTIONS)
    assert "is not empty, but holds no run.yaml of this command; use another folder" in message
    assert "nas.run needs search.method=trials" in refuse("run", small_yaml, "--run", tmp_path / "other")
