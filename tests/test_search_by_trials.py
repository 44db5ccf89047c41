"""The search by trials, as a command, the time of trials, and trainings that go on from them."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from nas.core.files import write_yaml
from nas.search import trials
from tests.making import assert_same_state, make_retraining
from tests.processes import refuse, start, succeed, wait_for

OPTIONS = [
    *("search.method=trials", "data.tokenizer=bpe", "data.vocab_size=310", "search.vocab_size=[300,310]"),
    *("search.d_model=[8,16]", "search.latency.source=flops", "search.latency.target=0.9", "train.epochs=2"),
]


@pytest.mark.slow
def test_a_search_repeats_its_choice_after_a_kill_and_its_network_goes_on_from_its_trial(
    tmp_path, small_yaml, text_folder
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    auto = *OPTIONS, "model.dropout=auto", "train.weight_decay=auto"  # on resume, auto means the recorded value
    shown = succeed("search", small_yaml, "--run", whole, *auto, "model.dropout=0.3")
    assert "trials take the steps of about 3.5 trainings" in shown and "\na whole training of 3" in shown
    minutes = re.search(r"the trials take about (\S+) minutes", shown)
    assert 0.1 < float(minutes[1]) < 10  # 19 starts of PyTorch
    choice = yaml.safe_load((whole / "trials" / "choice.yaml").read_text())
    (chosen,) = [one for one in choice["networks"] if one["name"] == choice["name"]]
    assert choice["ratio"] == chosen["ratio"] <= 0.9 and abs(chosen["behind"]) < 1e-9 and chosen["interval"] < 1e-4
    assert 2 < choice["trainings"] < 3.51
    text, moved = shutil.copytree(text_folder, tmp_path / "text"), tmp_path / "moved"
    begin = small_yaml, "--run", killed, *auto, f"data.source={text}"
    process = start("search", *begin, "model.dropout=0.3")
    wait_for(lambda: list(killed.glob("trials/*/trial-*.yaml")), process)
    process.kill()
    process.communicate()
    assert "already holds a run; add --resume" in refuse("search", *begin)
    resume = "search", *begin, "--resume", f"data.source={text.rename(moved)}"
    changed = refuse(*resume, "train.lr=0.5", "search.latency.target=1")
    assert "another configuration: train.lr (0.003 -> 0.5), search.latency.target (0.9 -> 1" in changed
    other = shutil.copytree(text_folder, tmp_path / "other")
    (other / "train.txt").write_text("Another first line .\n" + (other / "train.txt").read_text())
    assert "trained on another text: data_sha256 differs" in refuse(*resume, f"data.source={other}").replace("'", "")
    succeed(*resume)
    same = {key: value for key, value in choice.items() if key not in ("trial", "wall_time_s")}
    again = yaml.safe_load((killed / "trials" / "choice.yaml").read_text())
    assert {key: again[key] for key in same} == same
    assert (killed / "pi.jsonl").read_text() == (whole / "pi.jsonl").read_text()

    shown = succeed("derive", whole)
    assert "0.125     0.25      0.5        1\n" in shown and f"written to {whole / 'pattern-networks.png'}" in shown
    next_command = shown.splitlines()[-1].removeprefix("next: python retrain.py ").split()
    pattern = yaml.safe_load((whole / "pattern.yaml").read_text())
    network = choice["network"]
    assert {key: pattern[key] for key in network} == network and pattern["heads"] == pattern["d_model"] // 8
    shown = succeed("retrain", *next_command)
    assert f"going on from the trial {choice['trial']['folder']}" in shown
    results = yaml.safe_load((Path(next_command[next_command.index("--run") + 1]) / "results.yaml").read_text())
    ended = [one for one in choice["trials"] if one["share"] == 1 and one["name"] == choice["name"]]
    assert [one["bits_per_byte"] for one in ended] == [results["valid"]["bits_per_byte"]]
    choice_file = whole / "trials" / "choice.yaml"
    content = choice_file.read_text()
    choice_file.write_text(content[: content.rindex("cost:")])
    assert "choice.yaml is cut short: its last line must be `...`; remove it, and" in refuse("derive", whole, "--force")
    choice_file.write_text(content)
    (whole / "trials").rename(tmp_path / "trials")
    assert "choice.yaml is missing: continue the search with" in refuse("derive", whole, "--force")
    (tmp_path / "trials").rename(whole / "trials")
    succeed("derive", whole, "--latency-budget", 0.7, "--force")
    smaller = yaml.safe_load((whole / "pattern.yaml").read_text())
    assert smaller["derived_from"]["latency_budget"] == 0.7 and "trial" not in smaller["derived_from"]
    succeed("animate", whole)
    assert (whole / "pi.gif").exists()


@pytest.mark.slow
def test_a_budget_that_no_network_meets_names_the_least(tmp_path, small_yaml):
    message = refuse("search", small_yaml, "--run", tmp_path / "run", *OPTIONS, "search.latency.target=0.01")
    assert message.startswith("error: no network is within search.latency.target=0.01: the cheapest, of 3")
    assert "give at least that" in message and not (tmp_path / "run").exists()
    least = message.partition(" of the reference")[0].split()[-1]
    once = "train.epochs=0.2", f"search.latency.target={least}"
    shown = succeed("search", small_yaml, "--run", tmp_path / "run", *OPTIONS, *once)
    assert "networks are within" in shown and "trials take the steps of about 2.75 trainings" in shown
    choice = yaml.safe_load((tmp_path / "run" / "trials" / "choice.yaml").read_text())
    assert "\n0.5 of a training of 3" in shown and choice["trainings"] < 2.76


def test_the_time_of_a_training_counts_its_short_and_its_long_segments(small_config, monkeypatch):
    config = small_config("train.steps=8", "train.short_share=0.75")
    phase = make_retraining(config, ["attention"])
    monkeypatch.setattr(trials, "timed_rounds", lambda steps, *rest: dict(zip(steps, ([1.0], [3.0]), strict=True)))
    assert trials.step_seconds(phase) == (6 * 1 + 2 * 3) / 8


@pytest.mark.slow
def test_a_training_goes_on_from_its_trial_or_tells_what_differs(small_yaml, pattern, tmp_path, text_folder):
    trial, going_on, anew = (tmp_path / name for name in ("trial", "going-on", "anew"))
    succeed("retrain", pattern, small_yaml, "--run", trial, "--until", 4, "train.steps=8", "train.evaluate_every=0")
    blocks = {"format": "par-pattern/2", "blocks": ["attention", "dense", "identity"]}
    tried = blocks | {"derived_from": {"trial": str(trial)}}
    write_yaml(tmp_path / "tried.yaml", tried)
    free = "model.blocks=5", "evaluate.batch_size=3", "train.log_every=2", "train.checkpoint_every=3"
    shown = succeed("retrain", tmp_path / "tried.yaml", small_yaml, "--run", going_on, "train.steps=8", *free)
    assert f"going on from the trial {trial}" in shown
    succeed("retrain", pattern, small_yaml, "--run", anew, "train.steps=8")
    states = [torch.load(path / "checkpoint.pt", weights_only=True)["phase"]["model"] for path in (going_on, anew)]
    assert_same_state(*states)
    assert yaml.safe_load((going_on / "results.yaml").read_text())["train_tokens"] == 8 * 32
    edited = tried | {"blocks": ["attention", "dense"]}
    text = tmp_path / "text"
    shutil.copytree(text_folder, text)
    (text / "valid.txt").write_text("another text .\n" * 40)

    def starts_anew(content, *options) -> str:
        write_yaml(tmp_path / "changed.yaml", content)
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        shown = succeed("retrain", tmp_path / "changed.yaml", small_yaml, "--run", tmp_path / "other", *options)
        assert "the training starts anew" in shown
        return shown

    for content, options, told in (
        (tried, ["train.steps=9", "train.muon_lr=0.5"], "different are train.muon_lr (0.015 -> 0.5), steps (8 -> 9)"),
        (tried, ["train.steps=8", f"data.source={text}"], "different are the text or its tokenizer"),
        (edited, ["train.steps=8"], "different are blocks (adi -> ad)"),
        (blocks | {"derived_from": {"trial": "elsewhere"}}, ["train.steps=8"], "elsewhere: this folder is not here"),
    ):
        assert told in starts_anew(content, *options)
    (trial / "checkpoint.pt").unlink()
    assert f"the trial {trial}: its checkpoint.pt is missing" in starts_anew(tried, "train.steps=8")


@pytest.mark.slow
def test_all_that_ships_is_within_a_size(tmp_path, small_yaml):
    options = *OPTIONS, "mixture.states=20", "mixture.cache=[1,2]", "mixture.counts=3", "train.epochs=0.5"
    given = *options, "model.tie_embeddings=auto", "model.ngram_rows=auto"
    least = refuse("search", small_yaml, "--run", tmp_path / "none", *given, "search.size.target=20kB")
    found = re.search(r"no network is within search.size.target=20000, with counts of 5,000 bytes; give (\d+)kB", least)
    target = 1000 * int(found[1])
    for size in (1000, target - 1000):  # the advice does not depend on what was given, and is the smallest size
        refused = refuse("search", small_yaml, "--run", tmp_path / "none", *given, f"search.size.target={size}")
        assert f"give {found[1]}kB or more" in refused
    succeed("search", small_yaml, "--run", tmp_path / "search", *given, f"search.size.target={target}")
    choice = yaml.safe_load((tmp_path / "search/trials/choice.yaml").read_text())
    shown = succeed("derive", tmp_path / "search").splitlines()[-1]
    pattern = yaml.safe_load((tmp_path / "search/pattern.yaml").read_text())
    assert choice["size"] == {"target": target, "weights": "int8", "counts": pattern["counts_bytes"]} | {
        "others": target - pattern["counts_bytes"]
    }
    succeed("retrain", *shown.removeprefix("next: python retrain.py ").split())
    shown = succeed("export", tmp_path / "search-trained", "--out", tmp_path / "small", "--format", "par-int8")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "small").rglob("*") if file.is_file()}
    assert sizes["counts.npz"] <= pattern["counts_bytes"]  # tests/test_mixture.py fills a size
    assert 0.2 * target < sum(sizes.values()) <= target, sizes
    rounded = [float(bits) for bits in re.findall(r"(\S+) bits per byte on valid", shown)]
    assert rounded[1] == pytest.approx(rounded[0], rel=0.01)
    assert f"{sum(sizes.values()) - sizes['README.md']:,} bytes" in (tmp_path / "small/README.md").read_text()


@pytest.mark.slow
def test_embedding_and_output_layer_alone_are_a_network(tmp_path, small_yaml):
    sizes = "search.vocab_size=[]", "search.d_model=[]", "train.epochs=0.5", "search.operations=[dense,identity]"
    refused = refuse("search", small_yaml, "--run", tmp_path / "run", *OPTIONS, *sizes, "search.latency.target=0.01")
    least = re.search(r"costs (\S+) of the reference", refused)[1]
    options = *OPTIONS, *sizes, f"search.latency.target={least}"
    succeed("search", small_yaml, "--run", tmp_path / "run", *options)
    shown = succeed("derive", tmp_path / "run")
    assert "\nblocks: [identity]\n" in (tmp_path / "run/pattern.yaml").read_text()
    shown = succeed("retrain", *shown.splitlines()[-1].removeprefix("next: python retrain.py ").split())
    assert "going on from the trial" in shown and "pattern i, " in shown
