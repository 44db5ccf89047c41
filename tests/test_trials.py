"""Trials: their time, and trainings that go on from them."""

import shutil

import pytest
import torch
import yaml

from nas.core.files import write_yaml
from nas.search import trials
from tests.making import assert_same_state, make_retraining
from tests.processes import succeed


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
