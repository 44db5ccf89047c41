"""A trained model in use: load_model, and the commands generate, score and export."""

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
from tests.processes import ROOT, run_command

pytestmark = pytest.mark.slow
TRAIN = ["train.steps=12", "model.window=6", "model.cutoffs=[5,20]", "model.tie_embeddings=true"]
KINDS = {"words": [], "bytes": ["data.tokenizer=bytes"], "sentencepiece": ["data.tokenizer=sentencepiece"]}


def module(name, *arguments):
    done = run_command(["-m", f"nas.{name}", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(name, *arguments):
    """The only line of stderr of a command that must end with status 2."""
    done = run_command(["-m", f"nas.{name}", *arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml):
    """{tokenizer: run folder} of short trainings."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "pattern.yaml").write_text("format: par-pattern/1\nblocks: [window, dense, linear, attention]\n")
    for kind, options in KINDS.items():
        more = ["data.vocab_size=310"] if kind == "sentencepiece" else []
        command = [ROOT / "retrain.py", folder / "pattern.yaml", small_yaml, "--run", folder / kind]
        done = run_command([*command, *TRAIN, *options, *more])
        assert done.returncode == 0, done.stderr
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """{tokenizer: exported folder}. Its run folder is not needed."""
    folder = tmp_path_factory.mktemp("exported")
    for kind, run in trained.items():
        module("export", run, "--out", folder / kind)
    return {kind: folder / kind for kind in trained}


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_of_the_test_text_equals_the_results_of_the_run(kind, trained, text_folder):
    score = load_model(trained[kind]).score((text_folder / "test.txt").read_bytes())
    expected = yaml.safe_load((trained[kind] / "results.yaml").read_text())["test"]
    assert score.figures.keys() == expected.keys()
    for key, value in expected.items():
        assert score.figures[key] == pytest.approx(value, rel=1e-9), key
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


def test_a_text_without_a_last_line_end_has_no_word_for_it(trained):
    model = load_model(trained["words"])
    assert model.score("my sister sees it").figures["words"] == 4
    assert model.score("my sister sees it\n").figures["words"] == 5


def test_words_of_a_binary_text_are_not_compared(trained):
    figures = load_model(trained["bytes"]).score(b"a b\0c d\n").figures
    assert not figures["word_perplexity_comparable"] and figures["bits_per_byte_comparable"]


def test_the_score_command_prints_lines_tokens_and_figures(trained, tmp_path):
    (tmp_path / "text.txt").write_text("my sister sees it .\nthe river\n")
    score = load_model(trained["words"]).score((tmp_path / "text.txt").read_bytes())
    lines = module("score", trained["words"], tmp_path / "text.txt").splitlines()
    assert lines[1].split() == ["1", "6", f"{score.line_nll()[0]:.4f}", "my", "sister", "sees", "it", "."]
    assert lines[2].split()[:3] == ["2", "3", f"{score.line_nll()[1]:.4f}"]
    assert f"word perplexity {score.figures['word_perplexity']:.4f}, 9 words" in lines
    tokens = [
        json.loads(line)
        for line in module("score", trained["words"], tmp_path / "text.txt", "--per-token").splitlines()
    ]
    assert [entry["token"] for entry in tokens[:3]] == ["my", "sister", "sees"] and tokens[5]["token"] == "\n"
    assert tokens[0]["nll"] is None and [entry["line"] for entry in tokens] == [1] * 6 + [2] * 3
    assert math.isclose(sum(entry["nll"] for entry in tokens[1:]), score.figures["nll"])


def test_the_generate_command_prints_the_text_and_keeps_its_bytes(trained, tmp_path):
    command = ["generate", trained["bytes"], "--tokens", 40, "--seed", 3]
    printed = module(*command, "--prompt", "the naïve", "--out", tmp_path / "new")
    new = (tmp_path / "new").read_bytes()
    assert len(new) == 40 and printed == "the naïve" + new.decode(errors="replace") + "\n"
    (tmp_path / "prompt").write_text("the naïve")
    assert module(*command, "--prompt-file", tmp_path / "prompt") == printed
    several = module(*command, "--prompt", "the", "--samples", 2, "--out", tmp_path / "several")
    for number in (1, 2):
        sample = (tmp_path / f"several.{number}").read_bytes()
        assert len(sample) == 40
        assert f"--- sample {number}\nthe{sample.decode(errors='replace')}\n" in several


def test_generate_reads_the_prompt_from_the_standard_input(trained):
    command = [sys.executable, "-m", "nas.generate", trained["words"], "-", "--tokens", "3", "--temperature", "0"]
    done = subprocess.run(command, input=b"my sister", capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(b"my sister ")
    assert done.stdout.decode() == module("generate", trained["words"], "--prompt", "my sister", *command[-4:])
    swapped = [*command[:4], *command[5:], "-"]  # the options first
    assert subprocess.run(swapped, input=b"my sister", capture_output=True, cwd=ROOT, check=True).stdout == done.stdout
    both = run_command(["-m", "nas.generate", trained["words"], "-", "--prompt", "x"])
    assert both.returncode == 2 and "give only one of --prompt, --prompt-file and -" in both.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_gives_the_same_model(kind, trained, exported, text_folder):
    files = {str(path.relative_to(exported[kind])) for path in exported[kind].rglob("*") if path.is_file()}
    extra = {"words": {"vocabulary/words.txt"}, "sentencepiece": {"vocabulary/tokenizer.model"}, "bytes": set()}[kind]
    assert files == extra | {
        "model.safetensors", "config.json", "pattern.yaml", "pattern.png", "README.md", "vocabulary/ids.npy",
        "vocabulary/vocabulary.yaml",
    }  # fmt: skip
    run, out = load_model(trained[kind]), load_model(exported[kind])
    assert run.pattern == out.pattern == ["window", "dense", "linear", "attention"]
    assert run.generate("the", 20, seed=1) == out.generate("the", 20, seed=1)
    text = (text_folder / "valid.txt").read_bytes()
    assert run.score(text).figures == out.score(text).figures
    assert str(text_folder) not in (exported[kind] / "config.json").read_text()


def test_a_model_of_images_is_exported_scored_and_trained_on(small_yaml, tmp_path):
    images = np.random.default_rng(0).integers(0, 7, (60, 12), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    for split, part in (("train", images[:40]), ("valid", images[40:50]), ("test", images[50:])):
        (tmp_path / "data" / f"{split}.bin").write_bytes(part.tobytes())
    (pattern := tmp_path / "pattern.yaml").write_text("format: par-pattern/1\nblocks: [attention, dense]\n")
    options = ["model.positions=grid", "model.grid=[2,2,3]", "train.segment=12", "train.memory=0", "train.steps=3"]
    command = [ROOT / "retrain.py", pattern, small_yaml, *options, "data.vocab_size=null", "train.warmup_steps=1"]
    first = [*command, "--run", tmp_path / "run", "data.tokenizer=bytes", f"data.source={tmp_path / 'data'}"]
    assert (done := run_command(first)).returncode == 0, done.stderr
    module("export", tmp_path / "run", "--out", tmp_path / "out")
    more = [*command, "--run", tmp_path / "more", f"train.init_from={tmp_path / 'out'}", "data.tokenizer=bytes"]
    assert (done := run_command([*more, f"data.source={tmp_path / 'data'}"])).returncode == 0, done.stderr
    scores = [load_model(tmp_path / name).score(images[50:].tobytes()) for name in ("run", "out", "more")]
    assert scores[0].figures == scores[1].figures != scores[2].figures
    assert not scores[0].figures["word_perplexity_comparable"]
    card = (tmp_path / "out" / "README.md").read_text()
    module("export", tmp_path / "more", "--out", tmp_path / "more-out")
    assert "from scratch" in card and "the weights of `out`" in (tmp_path / "more-out" / "README.md").read_text()


def test_the_model_card_tells_the_figures_and_leaves_the_licence_open(trained, exported):
    card = (exported["words"] / "README.md").read_text()
    results = yaml.safe_load((trained["words"] / "results.yaml").read_text())
    assert "`wdla`" in card and f"{results['test']['word_perplexity']:.2f}" in card
    assert "State one before you publish" in card and "](pattern.png)" in card


def test_an_exported_pattern_can_be_trained_again(exported, small_yaml, tmp_path):
    done = run_command(
        [
            ROOT / "retrain.py",
            exported["words"] / "pattern.yaml",
            small_yaml,
            "--run",
            tmp_path / "run",
            "train.steps=2",
        ]
    )
    assert done.returncode == 0, done.stderr


def test_a_training_starts_from_the_weights_of_another(trained, exported, small_yaml, tmp_path):
    """Before the first step it is that model, also with another text, whose tokens have other frequencies."""
    other = tmp_path / "text"
    other.mkdir()
    for split, content in (("train", "a red fox\nthe river\n" * 99), ("valid", "it\n" * 30), ("test", "it sees\n" * 9)):
        (other / f"{split}.txt").write_text(content)
    pattern, results = shutil.copy(exported["words"] / "pattern.yaml", tmp_path), {}
    for origin in (trained["words"], exported["words"]):
        run = tmp_path / f"from-{origin.parent.name}"
        more = [f"data.source={other}", f"train.init_from={origin}", "train.steps=1", "train.warmup_steps=1"]
        more += ["train.lr=1e-12", "train.muon_lr=1e-12", "train.weight_decay=0", *TRAIN[1:]]
        done = run_command([ROOT / "retrain.py", pattern, small_yaml, "--run", run, *more])
        assert done.returncode == 0, done.stderr
        assert "starting from the weights of" in done.stdout
        results[origin] = yaml.safe_load((run / "results.yaml").read_text())["test"]["nll"]
        assert load_model(run).generate("the", 9, seed=1) == load_model(origin).generate("the", 9, seed=1)
        if origin is exported["words"]:
            origin.rename(tmp_path / "gone")  # the run holds all that it needs
            done = run_command([ROOT / "retrain.py", pattern, small_yaml, "--run", run, "--eval-only", *more])
            (tmp_path / "gone").rename(origin)
            assert done.returncode == 0, done.stderr
    expected = load_model(trained["words"]).score((other / "test.txt").read_bytes()).figures["nll"]
    assert list(results.values()) == pytest.approx([expected] * 2, rel=1e-6)


def test_a_run_without_a_checkpoint_starts_again_from_the_weights_of_its_origin(
    trained, exported, small_yaml, tmp_path
):
    run = tmp_path / "run"
    command = [ROOT / "retrain.py", exported["words"] / "pattern.yaml", small_yaml, "--run", run]
    command += [f"train.init_from={trained['words']}", *TRAIN, "train.log_every=1"]
    assert (done := run_command(command)).returncode == 0, done.stderr
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    for name in ("checkpoint.pt", "best.pt", "results.yaml", "metrics.jsonl"):
        (run / name).unlink()
    done = run_command([*command, "--resume"])
    assert done.returncode == 0 and "starting from the weights of" in done.stdout, done.stderr
    assert (run / "metrics.jsonl").read_text().splitlines()[0] == first


def test_a_training_starts_from_the_path_of_a_search(small_yaml, tmp_path):
    search, run = tmp_path / "search", tmp_path / "run"
    options = ["search.operations=[attention,window,dense]", "model.window=6", "model.tie_embeddings=true"]
    done = run_command([ROOT / "search.py", small_yaml, "--run", search, *options])
    assert done.returncode == 0, done.stderr
    (tmp_path / "pattern.yaml").write_text("format: par-pattern/1\nblocks: [window, dense, attention]\n")
    more = [*options, f"train.init_from={search}", "train.steps=1", "train.lr=1e-12", "train.muon_lr=1e-12"]
    command = [ROOT / "retrain.py", tmp_path / "pattern.yaml", small_yaml, "--run", run, *more, "train.warmup_steps=1"]
    done = run_command([*command, "train.weight_decay=0"])
    assert done.returncode == 0, done.stderr

    state = torch.load(search / "checkpoint.pt", weights_only=True)["phase"]["supernet"]
    weights = load_model(run).module.state_dict()
    for block, (operation, name) in enumerate([(1, "attention.query"), (2, "expand"), (0, "attention.output")]):
        expected = state[f"backbone.blocks.{block}.candidates.{operation}.{name}.weight"]
        torch.testing.assert_close(weights[f"blocks.{block}.operation.{name}.weight"], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights["embedding.weight"], state["backbone.embedding.weight"], rtol=1e-5, atol=1e-7)
    (tmp_path / "pattern.yaml").write_text("format: par-pattern/1\nblocks: [window, dense, linear]\n")
    done = run_command([*command[:3], "--run", tmp_path / "other", *more])
    assert "is a search; derive its pattern and train it" in refuse("generate", search)
    assert done.returncode == 2 and "so it has no weights for wdl; give a pattern of as many blocks" in done.stderr


def test_an_origin_that_does_not_fit_is_named(trained, exported, small_yaml, pattern, tmp_path):
    def message(pattern, *options):
        done = run_command([ROOT / "retrain.py", pattern, small_yaml, "--run", tmp_path / "run", *options])
        assert done.returncode == 2 and not (tmp_path / "run").exists()
        return done.stderr

    origin, own = f"train.init_from={trained['words']}", exported["words"] / "pattern.yaml"
    assert "has the pattern wdla, not adi" in message(pattern, origin)
    assert "has model.window=6, not 4; give the options of that model" in message(own, origin, *TRAIN[2:])
    assert "has model.d_model=16, not 32" in message(own, origin, *TRAIN[1:], "model.d_model=32")
    assert "holds neither best.pt nor model.safetensors" in message(own, f"train.init_from={tmp_path}")
    assert "there is no folder" in message(own, f"train.init_from={tmp_path / 'no'}")


def test_a_damaged_or_foreign_folder_is_named(exported, trained, tmp_path):
    copy = shutil.copytree(exported["words"], tmp_path / "copy")
    weights, config = (copy / "model.safetensors").read_bytes(), (copy / "config.json").read_bytes()
    for damage, message in (
        (("model.safetensors", weights[:-7]), "model.safetensors is damaged"),
        (("model.safetensors", b"x"), "model.safetensors is damaged"),
        (("model.safetensors", weights[:-9] + b"\1" + weights[-8:]), "model.safetensors is damaged"),
        (("config.json", b"{"), "config.json is not YAML"),
        (("config.json", config.replace(b"[\n      5,\n      20\n    ]", b'"auto"')), "has model.cutoffs=auto"),
        (("vocabulary/vocabulary.yaml", b"format: par-vocabulary/1\n"), "vocabulary.yaml is damaged"),
        (
            ("config.json", b'{"format": "other/1", "architectures": []}'),
            "config.json has format 'other/1'; this version reads 'par-model/1'",
        ),
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
    assert "holds neither best.pt nor model.safetensors" in refuse("score", tmp_path, ROOT / "README.md")


def test_an_export_needs_a_finished_training_and_an_empty_folder(trained, exported, tmp_path):
    assert "holds no results.yaml" in refuse("export", tmp_path, "--out", tmp_path / "out")
    assert "is not an empty folder" in refuse("export", trained["words"], "--out", exported["words"])


def test_mistakes_in_prompts_and_texts_are_named(trained, tmp_path):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    run = trained["words"]
    assert "the text is not UTF-8 (byte 2)" in refuse("generate", run, "--prompt-file", tmp_path / "latin")
    assert "No such file" in refuse("generate", run, "--prompt-file", tmp_path / "no")
    assert "there is no folder" in refuse("generate", run, "--prompt", "x", "--out", tmp_path / "no" / "out")
    assert "temperature -1.0 must be 0 or more" in refuse("generate", run, "--temperature", "-1")
    (tmp_path / "one").write_text("x")
    assert "the text has 1 tokens" in refuse("score", run, tmp_path / "one")
    assert "cannot read" in refuse("score", run, tmp_path / "no")


def test_importing_nas_imports_no_torch():
    code = "import sys, nas; assert 'torch' not in sys.modules; assert callable(nas.load_model)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_folder_without_a_training_is_refused_in_python(tmp_path):
    with pytest.raises(InputError, match="holds neither"):
        load_model(tmp_path)


def test_the_example_in_the_documentation_runs(trained, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.DOTALL)
    exec(example.replace("runs/retrain", str(trained["sentencepiece"])), {})
    printed = capsys.readouterr().out
    assert "b'The church'" in printed and "['window', 'dense', 'linear', 'attention'] 16" in printed
