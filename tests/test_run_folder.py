import argparse
import os
import re
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from nas.core import run_folder
from nas.core.config import EVAL_ONLY, config_of, flat_config, options
from nas.core.errors import InputError, RunError, run_command
from nas.core.files import read_jsonl, read_yaml, write_jsonl, write_yaml
from nas.core.outcome import read_pi
from nas.core.run_folder import RunFolder, check_folder
from nas.training.trainer import load_checkpoint, save_checkpoint


def start(path, config, stage="search", **more):
    run = RunFolder(path, config, stage, **more)
    run.start(config, {"seed": 1})
    return run


def refuse(message, function, *arguments, **more):
    with pytest.raises(InputError, match=message):
        function(*arguments, **more)


def test_a_run_is_never_overwritten_and_resuming_needs_one(tmp_path, small_config):
    folder = tmp_path / "new/run"
    check_folder(folder, False, "search")
    RunFolder(folder, small_config(), "search")
    assert not (tmp_path / "new").exists()
    folder.mkdir(parents=True)
    (folder / "latency.yaml").touch()  # costs that the search shall use
    check_folder(folder, False, "search")
    run = start(folder, small_config())
    check_folder(run.path, True, "search")
    RunFolder(run.path, small_config("data.source=/elsewhere"), "search")  # the same text may have moved
    refuse("already holds a run; add --resume", check_folder, folder, False, "search")
    other, nearest = "holds a search run, not a retrain run; use another folder", "the nearest run is .*new/run"
    for resume in (False, True):
        refuse(f"new/run {other}", check_folder, folder, resume, "retrain")
    refuse(f"new/rum does not exist; {nearest}; without --resume", check_folder, tmp_path / "new/rum", True, "search")
    missing = "nothing/run does not exist; without --resume a new run starts"
    refuse(missing, check_folder, tmp_path / "nothing/run", True, "search")
    assert not (tmp_path / "new/rum").exists() and not (tmp_path / "nothing").exists()
    (tmp_path / "begun/trials").mkdir(parents=True)
    refuse(f"begun {other}", check_folder, tmp_path / "begun", True, "retrain")
    (folder / "config.yaml").unlink()  # then the folder is foreign
    refuse(r"is not empty, but holds no config\.yaml of a run", check_folder, folder, True, "search")
    refuse("is a file; give a folder", check_folder, folder / "provenance.yaml", True, "search")
    refuse("/proc/run cannot be written: .*; give another folder", check_folder, Path("/proc/run"), False, "search")


def test_a_run_that_another_process_began_meanwhile_is_refused(tmp_path, small_config):
    late = RunFolder(tmp_path / "run", small_config("train.lr=0.5"), "search")
    first = start(tmp_path / "run", small_config())
    os.close(first.lock)  # it has ended
    before = (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(InputError, match="was begun by another process meanwhile; use another folder"):
        late.start(small_config("train.lr=0.5"), {"seed": 1})
    assert (tmp_path / "run/config.yaml").read_text() == before


def test_resuming_with_another_configuration_names_the_keys(tmp_path, small_config):
    start(tmp_path / "run", small_config(), extra={"pattern": ["dense"]})
    changed = small_config("train.lr=0.5", "search.arch_fraction=0.3", "data.cache=/elsewhere")
    told = r"configuration: train.lr \(0.003 -> 0.5\), search.arch_fraction \(0.2 -> 0.3\); use the options of"
    refuse(told, RunFolder, tmp_path / "run", changed, "search", {"pattern": ["dense"]})
    refuse("pattern", RunFolder, tmp_path / "run", small_config(), "search", {"pattern": ["identity"]})


def test_resuming_accepts_other_values_of_the_documented_options_only(tmp_path, small_config):
    text = (Path(__file__).parents[1] / "docs" / "run-folder.md").read_text("utf-8")
    free = {*re.findall(r"`(\w+\.\w+)`", text.partition("Only these\n")[2].partition("A training also")[0])}
    searches = {key for key in options() if key.startswith("search.")} - {"search.latency.timing"}
    evaluations = {key for key in options() if key.startswith(("evaluate.", "mixture."))} | {"train.threads"}
    config = small_config()
    config.search.batch, config.search.networks = 4, 12  # auto takes the recorded values
    for stage, marks, more in (
        ("search", (), set()),
        ("retrain", (), searches),
        ("compare", (), searches),
        ("retrain", (EVAL_ONLY,), searches | evaluations),
    ):
        run, accepted = RunFolder(tmp_path, config, stage, None, marks), set()
        for key in options():
            run.recorded = asdict(config_of(flat_config(config) | {key: "other"}))
            try:
                run.check_config(config)
                accepted.add(key)
            except InputError as error:
                assert f"configuration: {key} (other -> " in str(error)
        assert accepted == free | more


def test_an_option_that_is_missing_in_an_older_run_has_its_default(tmp_path, small_config):
    run = start(tmp_path / "run", small_config())
    content = yaml.safe_load((run.path / "config.yaml").read_text())
    del content["model"]["activation"], content["evaluate"]
    write_yaml(run.path / "config.yaml", content)
    RunFolder(run.path, small_config(), "search")
    with pytest.raises(InputError, match=r"model.activation \(relu -> gelu\); use the options of"):
        RunFolder(run.path, small_config("model.activation=gelu"), "search")


def test_auto_cutoffs_mean_the_recorded_cutoffs(tmp_path, small_config):
    given, final, other = (small_config(f"model.cutoffs={cutoffs}") for cutoffs in ("auto", "[4,9]", "[4,8]"))
    run = RunFolder(tmp_path / "run", given, "search")
    run.start(final, {"seed": 1})
    os.close(run.lock)
    again = RunFolder(run.path, given, "search")
    assert given.model.cutoffs == "auto" and again.resolve_auto(given) == final
    refuse(r"model.cutoffs \(\[4, 9\] -> \[4, 8\]\); use the options of", again.start, other, {"seed": 1})
    os.close(again.lock)
    RunFolder(run.path, given, "search").start(final, {"seed": 1})


def test_resuming_on_changed_text_is_refused(tmp_path, small_config):
    origin = {"data_sha256": {"train": "a"}, "tokenizer_sha256": "t", "vocab_size": 5, "command": "x"}
    for changed in ({"data_sha256": {"train": "b"}}, {"tokenizer_sha256": "u"}, {"vocab_size": 6}):
        path = tmp_path / next(iter(changed))
        run = RunFolder(path, small_config(), "search")
        run.start(small_config(), origin)
        os.close(run.lock)
        again = RunFolder(path, small_config(), "search")
        told = f"{path.name} differs from its provenance.yaml"
        refuse(told, again.start, small_config(), {**origin, **changed})
        os.close(again.lock)
        RunFolder(path, small_config(), "search").start(small_config(), origin)
        assert yaml.safe_load((path / "provenance.yaml").read_text())["resumed"] == [{"command": "x"}]


def test_processes_cannot_share_a_run_and_the_second_waits_for_the_first(tmp_path, small_config, monkeypatch):
    first = start(tmp_path / "run", small_config())
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "LOCK_S", 0.2)
        refuse("in use by another process", start, tmp_path / "run", small_config())
    threading.Timer(0.5, os.close, [first.lock]).start()
    start(tmp_path / "run", small_config())


def test_lines_after_the_checkpoint_are_cut(tmp_path, small_config):
    run = start(tmp_path / "run", small_config())
    for step in range(1, 6):
        run.metrics(step, step * 10, "train", 1.5)
    run.metrics(3, 30, "test", 1.5)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "tok')  # cut short by a kill
    assert len(read_jsonl(run.path / "metrics.jsonl")) == 6
    run.cut_after(3)
    assert [line["step"] for line in read_jsonl(run.path / "metrics.jsonl")] == [1, 2, 3]
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    refuse("line 2 is not JSON", read_jsonl, run.path / "metrics.jsonl")


def test_a_file_that_is_cut_short_anywhere_is_refused(tmp_path):
    path, content = tmp_path / "file.yaml", {"text": "é: ...", "list": [1, 2.5], "nested": {"a": None, "b": "\n...\n"}}
    write_yaml(path, content)
    assert read_yaml(path) == content
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        refuse(r"file.yaml is cut short: its last line must be `...`; remove it, and repeat", read_yaml, path)


def test_pi_is_read_with_clear_errors(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        refuse(r"holds no pi.jsonl with a logged step; give the --run folder of a search", read_pi, folder)
    good = {"step": 0, "temperature": 1, "operations": ["dense", "identity"], "pi": [[0.5, 0.5]]}
    bad = [good | {"pi": pi} for pi in ([], [[1.0]], 3, [[0.5], [0.5, 0]])] + [good | {"operations": []}]
    bad += [{key: good[key] for key in good if key != missing} for missing in good]
    for before, lines in ([], bad), ([good], [*bad, good | {"pi": [[0.5, 0.5]] * 2}]):
        for line in lines:
            write_jsonl(tmp_path / "pi.jsonl", [*before, line])
            refuse(f"is damaged: line {len(before) + 1} lacks", read_pi, tmp_path)


def test_damaged_checkpoints_are_reported(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"weights": torch.arange(5000.0), "list": [1, None, "x"]})
    assert load_checkpoint(path, "weights")["list"] == [1, None, "x"]
    whole = path.read_bytes()
    cut = [whole[:length] for length in range(0, len(whole), 499)]  # torch.load() raises several kinds of errors
    for damaged in (*cut, b"not a checkpoint at all", whole[:100] + b"\0" * 200 + whole[300:]):
        path.write_bytes(damaged)
        refuse("is damaged or not a checkpoint", load_checkpoint, path, "weights")


class Malicious:
    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('ran').touch()",))


def test_foreign_checkpoints_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": "par-checkpoint/6", "payload": Malicious()}, "bad.pt")
    refuse("damaged or not a checkpoint", load_checkpoint, tmp_path / "bad.pt", "payload")
    assert not (tmp_path / "ran").exists()
    torch.save({"state_dict": {}}, "other.pt")
    refuse("is not a par-checkpoint/6 with `phase`", load_checkpoint, tmp_path / "other.pt", "phase")


def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"step": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left on device; the previous one is unchanged"):
        save_checkpoint(path, {"step": 2})
    monkeypatch.undo()
    assert load_checkpoint(path, "step")["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("32000 requested and 8160 written")])
def test_a_full_disk_is_named_also_where_numpy_does_not(error, monkeypatch, capsys):
    def write():
        raise error

    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)  # run_command replaces it
    with pytest.raises(SystemExit):
        run_command(write)
    assert capsys.readouterr().err == "error: No space left on device\n"
