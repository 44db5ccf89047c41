"""A trained model in use: load_model, exported folders, and the commands generate, score and export."""

import json
import math
import re
import shutil
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load, save

from nas import load_model
from nas.core.errors import InputError
from nas.core.files import write_yaml
from tests.making import KINDS
from tests.processes import ROOT, refuse, succeed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_of_the_test_text_equals_the_results_of_the_run(kind, trained, text_folder):
    score = load_model(trained[kind]).score((text_folder / "test.txt").read_bytes())
    expected = yaml.safe_load((trained[kind] / "results.yaml").read_text())["test"]
    assert score.metrics.keys() == expected.keys()
    for key, value in expected.items():
        assert score.metrics[key] == pytest.approx(value, rel=1e-9), key
    assert np.isnan(score.nll[0]) and not np.isnan(score.nll[1:]).any()
    assert score.line_nll().sum() == pytest.approx(expected["nll"])
    assert len(score.lines) == (text_folder / "test.txt").read_text().count("\n")


def test_the_nll_of_a_text_within_a_segment_is_that_of_one_forward_pass(trained):
    model, text = load_model(trained["words"]), "it\nthe £5\n\nx"
    ids = torch.from_numpy(model.tokenizer.encode(text).astype(np.int64))[None]
    assert ids.shape[1] == 7
    with torch.no_grad():
        nll, _ = model.module(ids[:, :-1], ids[:, 1:], None, 8)
    np.testing.assert_allclose(model.score(text).nll[1:], nll[0], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_nll_of_a_line_is_the_sum_over_its_tokens(kind, trained):
    model, text = load_model(trained[kind]), "it\nthe £5\n\nx"
    score = model.score(text)
    ends = np.cumsum([len(model.tokenizer.encode(line)) for line in ("it\n", "the £5\n", "\n", "x")])
    expected = [part.sum() for part in np.split(np.nan_to_num(score.nll), ends[:-1])]
    np.testing.assert_allclose(score.line_nll(), expected)


def test_words_are_counted_by_their_ends_and_not_compared_in_a_binary_text(trained):
    model = load_model(trained["words"])
    assert [model.score(f"my sister sees it{end}").metrics["words"] for end in ("", "\n")] == [4, 5]
    metrics = load_model(trained["bytes"]).score(b"a b\0c d\n").metrics
    assert not metrics["word_perplexity_comparable"] and metrics["bits_per_byte_comparable"]


def test_a_score_is_printed_in_lines_tokens_and_figures(trained, tmp_path):
    (tmp_path / "text.txt").write_text("my sister sees it .\nthe river\n")
    score = load_model(trained["words"]).score((tmp_path / "text.txt").read_bytes())
    lines = str(score).splitlines()
    assert f"{score!r}\n" == succeed("score", trained["words"], tmp_path / "text.txt")
    assert lines[1].split() == ["1", "6", f"{score.line_nll()[0]:.4f}", "my", "sister", "sees", "it", "."]
    assert lines[2].split()[:3] == ["2", "3", f"{score.line_nll()[1]:.4f}"]
    assert f"word perplexity {score.metrics['word_perplexity']:.4f}, 9 words and line ends" in lines
    printed = succeed("score", trained["words"], tmp_path / "text.txt", "--per-token")
    tokens = [json.loads(line) for line in printed.splitlines()]
    assert [entry["token"] for entry in tokens[:3]] == ["my", " sister", " sees"] and tokens[5]["token"] == "\n"
    assert tokens[0]["nll"] is None and [entry["line"] for entry in tokens] == [1] * 6 + [2] * 3
    assert math.isclose(sum(entry["nll"] for entry in tokens[1:]), score.metrics["nll"])


def test_the_generate_command_prints_the_text_and_keeps_its_bytes(trained, tmp_path):
    command = ["generate", trained["bytes"], "--tokens", 40, "--seed", 3]
    printed = succeed(*command, "--prompt", "the naïve", "--out", tmp_path / "new")
    new = (tmp_path / "new").read_bytes()
    assert len(new) == 40 and printed == "the naïve" + new.decode(errors="replace") + "\n"
    (tmp_path / "prompt").write_text("the naïve")
    assert succeed(*command, "--prompt-file", tmp_path / "prompt") == printed
    several = succeed(*command, "--prompt", "the", "--samples", 2, "--out", tmp_path / "several")
    for number in (1, 2):
        sample = (tmp_path / f"several.{number}").read_bytes()
        assert len(sample) == 40
        assert f"--- sample {number}\nthe{sample.decode(errors='replace')}\n" in several


def test_generate_reads_the_prompt_from_the_standard_input(trained):
    command = [sys.executable, "-m", "nas.generate", trained["words"], "-", "--tokens", "3", "--temperature", "0"]
    done = subprocess.run(command, input=b"my sister", capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(b"my sister ")
    assert done.stdout.decode() == succeed("generate", trained["words"], "--prompt", "my sister", *command[-4:])
    swapped = [*command[:4], *command[5:], "-"]  # the options first
    assert subprocess.run(swapped, input=b"my sister", capture_output=True, cwd=ROOT, check=True).stdout == done.stdout
    wrong = refuse("generate", trained["words"], "once upon")
    assert "'once upon' is not '-'; give a prompt with --prompt TEXT" in wrong
    both = refuse("generate", trained["words"], "-", "--prompt", "x")
    assert "give only one of --prompt, --prompt-file and -" in both


def test_mistakes_in_prompts_and_texts_are_named(trained, tmp_path):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    run = trained["words"]
    assert "the text is not UTF-8 (byte 2)" in refuse("generate", run, "--prompt-file", tmp_path / "latin")
    assert "No such file" in refuse("generate", run, "--prompt-file", tmp_path / "no")
    assert "there is no folder" in refuse("generate", run, "--prompt", "x", "--out", tmp_path / "no" / "out")
    (tmp_path / "mine.2").touch()
    many = "generate", run, "--samples", 2, "--out", tmp_path / "mine"
    assert "mine.2 exists; name another file, or remove it" in refuse(*many)
    assert "temperature -1.0 must be 0 or more" in refuse("generate", run, "--temperature", "-1")
    (tmp_path / "one").write_text("x")
    assert "the text has 1 tokens" in refuse("score", run, tmp_path / "one")
    assert "cannot read" in refuse("score", run, tmp_path / "no")


def test_a_folder_without_a_training_is_refused_in_python(tmp_path):
    with pytest.raises(InputError, match="holds no finished training"):
        load_model(tmp_path)


def test_the_example_in_the_documentation_runs(trained, capsys):
    text = (ROOT / "docs" / "use.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)  # others need Transformers or lm_eval
    exec(example.replace("runs/mine/found", str(trained["sentencepiece"])), {})
    printed = capsys.readouterr().out
    assert "b'The church'" in printed and "['window 6', 'dense', 'linear', 'attention'] 16" in printed


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
    assert run.score(text).metrics == out.score(text).metrics
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
    assert scores[0].metrics == scores[1].metrics != scores[2].metrics
    assert not scores[0].metrics["word_perplexity_comparable"]
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
    for (name, content), message in (
        (("model.safetensors", b"x"), "model.safetensors is damaged"),
        (("model.safetensors", weights[:-9] + b"\1" + weights[-8:]), "model.safetensors is damaged"),
        (("config.json", b"{"), "config.json is not YAML"),
        (("vocabulary/vocabulary.yaml", b"format: par-vocabulary/1\n...\n"), "vocabulary.yaml is damaged"),
        (("config.json", b'{"format": "other/1"}'), "has format 'other/1'; this version reads 'par-model/4'"),
        (("config.json", (copy / "config.json").read_bytes().replace(b'"linear"', b'"dense"', 1)), "does not fit its"),
        (("vocabulary/ids.npy", b"x"), "ids.npy is missing or damaged"),
    ):
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(content)
        assert message in refuse("generate", copy, "--prompt", "the"), message
        (copy / name).write_bytes(before)
    assert load_model(copy).generate("the", 3, seed=1)
    unknown = save(load(weights) | {"another": torch.zeros(2)})
    (copy / "model.safetensors").write_bytes(unknown)
    digests = (sha256(data).hexdigest().encode() for data in (weights, unknown))
    (copy / "config.json").write_bytes(config.replace(*digests))
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
