"""Exported models: nas.export, and load_model on its folder."""

import json
import shutil
from hashlib import sha256

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load, save

from nas import load_model
from nas.core.files import write_yaml
from tests.making import KINDS
from tests.processes import ROOT, refuse, succeed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_gives_the_same_model(kind, trained, exported, text_folder):
    files = {str(path.relative_to(exported[kind])) for path in exported[kind].rglob("*") if path.is_file()}
    extra = {"words": {"vocabulary/words.txt"}, "sentencepiece": {"vocabulary/tokenizer.model"}, "bytes": set()}[kind]
    assert files == extra | {
        "model.safetensors", "config.json", "pattern.yaml", "pattern.png", "README.md", "vocabulary/ids.npy",
        "vocabulary/vocabulary.yaml",
    }  # fmt: skip
    run, out = load_model(trained[kind]), load_model(exported[kind])
    assert run.pattern == out.pattern == ["window 6", "dense", "linear", "attention"]
    assert run.generate("the", 20, seed=1) == out.generate("the", 20, seed=1)
    text = (text_folder / "valid.txt").read_bytes()
    assert run.score(text).figures == out.score(text).figures
    assert str(text_folder) not in (exported[kind] / "config.json").read_text()


def test_a_model_of_images_is_exported_scored_and_trained_on(small_yaml, tmp_path):
    images = np.random.default_rng(0).integers(0, 7, (60, 12), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    for split, part in (("train", images[:40]), ("valid", images[40:50]), ("test", images[50:])):
        (tmp_path / "data" / f"{split}.bin").write_bytes(part.tobytes())
    (pattern := tmp_path / "pattern.yaml").write_text("format: par-pattern/2\nblocks: [attention, dense]\n")
    options = ["model.grid=[2,2,3]", "train.segment=12", "train.memory=0", "train.steps=3"]
    options += ["data.tokenizer=bytes", f"data.source={tmp_path / 'data'}", "data.vocab_size=null"]
    options += ["train.warmup_steps=1"]
    succeed("retrain", pattern, small_yaml, *options, "--run", tmp_path / "run")
    succeed("export", tmp_path / "run", "--out", tmp_path / "out")
    origin = f"train.init_from={tmp_path / 'out'}"
    succeed("retrain", pattern, small_yaml, *options, "--run", tmp_path / "more", origin)
    scores = [load_model(tmp_path / name).score(images[50:].tobytes()) for name in ("run", "out", "more")]
    assert scores[0].figures == scores[1].figures != scores[2].figures
    assert not scores[0].figures["word_perplexity_comparable"]
    card = (tmp_path / "out" / "README.md").read_text()
    succeed("export", tmp_path / "more", "--out", tmp_path / "more-out")
    assert "from scratch" in card and "the weights of `out`" in (tmp_path / "more-out" / "README.md").read_text()


def test_the_model_card_tells_the_figures_and_leaves_the_licence_open(trained, exported):
    card = (exported["words"] / "README.md").read_text()
    results = yaml.safe_load((trained["words"] / "results.yaml").read_text())
    assert "`w6 d l a`" in card and f"{results['test']['word_perplexity']:.2f}" in card
    assert "State one before you publish" in card and "](pattern.png)" in card


def test_an_exported_model_can_be_trained_on_with_a_configuration_of_another_width(exported, small_yaml, tmp_path):
    out, wide = exported["words"], tmp_path / "wide.yaml"
    content = yaml.safe_load(small_yaml.read_text())
    content["model"] = json.loads((out / "config.json").read_text())["model"] | {"d_model": 32}
    wide.write_text(yaml.safe_dump(content))
    more = [f"train.init_from={out}", "train.steps=2"]
    succeed("retrain", out / "pattern.yaml", wide, "--run", tmp_path / "run", *more)
    told = f"error: train.init_from={out} has model.d_model=16, not 32; give the options of that model"
    assert refuse("retrain", out / "pattern.yaml", wide, "--run", tmp_path / "2", *more, "model.d_model=32") == told


def test_a_damaged_or_foreign_folder_is_named(exported, trained, tmp_path):
    copy = shutil.copytree(exported["words"], tmp_path / "copy")
    weights, config = (copy / "model.safetensors").read_bytes(), (copy / "config.json").read_bytes()
    for damage, message in (
        (("model.safetensors", b"x"), "model.safetensors is damaged"),
        (("model.safetensors", weights[:-9] + b"\1" + weights[-8:]), "model.safetensors is damaged"),
        (("config.json", b"{"), "config.json is not YAML"),
        (("vocabulary/vocabulary.yaml", b"format: par-vocabulary/1\n...\n"), "vocabulary.yaml is damaged"),
        (("config.json", b'{"format": "other/1"}'), "has format 'other/1'; this version reads 'par-model/3'"),
        (("config.json", (copy / "config.json").read_bytes().replace(b'"linear"', b'"dense"', 1)), "does not fit its"),
        (("vocabulary/ids.npy", b"x"), "ids.npy is missing or damaged"),
    ):
        name, content = damage
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(content)
        assert message in refuse("generate", copy, "--prompt", "the"), message
        (copy / name).write_bytes(before)
    assert load_model(copy).generate("the", 3, seed=1)
    unknown = save(load(weights) | {"another": torch.zeros(2)})
    (copy / "model.safetensors").write_bytes(unknown)
    (copy / "config.json").write_bytes(
        config.replace(*(sha256(data).hexdigest().encode() for data in (weights, unknown)))
    )
    assert "the model has no another" in refuse("generate", copy, "--prompt", "the")
    told = refuse("score", tmp_path, ROOT / "README.md")
    assert f"{tmp_path} holds no finished training; give the run folder of a training, or a folder of" in told
    (tmp_path / "model.onnx").touch()
    assert f"{tmp_path} is an ONNX folder, which only" in refuse("generate", tmp_path)
    write_yaml(tmp_path / "summary.yaml", {"use": "usual"})
    assert f"{tmp_path} is a run of all stages: give {tmp_path / 'usual'}" in refuse("generate", tmp_path)


def test_an_export_needs_a_finished_training_and_an_empty_folder(trained, exported, tmp_path):
    assert "holds no finished training" in refuse("export", tmp_path, "--out", tmp_path / "out")
    assert "is not an empty folder" in refuse("export", trained["words"], "--out", exported["words"])
