"""A trained model in use: load_model, and the commands generate and score."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from nas import load_model
from nas.core.errors import InputError
from tests.making import KINDS
from tests.processes import ROOT, refuse, succeed

pytestmark = pytest.mark.slow


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


def test_words_are_counted_by_their_ends_and_not_compared_in_a_binary_text(trained):
    model = load_model(trained["words"])
    assert [model.score(f"my sister sees it{end}").figures["words"] for end in ("", "\n")] == [4, 5]
    figures = load_model(trained["bytes"]).score(b"a b\0c d\n").figures
    assert not figures["word_perplexity_comparable"] and figures["bits_per_byte_comparable"]


def test_a_score_is_printed_in_lines_tokens_and_figures(trained, tmp_path):
    (tmp_path / "text.txt").write_text("my sister sees it .\nthe river\n")
    score = load_model(trained["words"]).score((tmp_path / "text.txt").read_bytes())
    lines = str(score).splitlines()
    assert f"{score!r}\n" == succeed("score", trained["words"], tmp_path / "text.txt")
    assert lines[1].split() == ["1", "6", f"{score.line_nll()[0]:.4f}", "my", "sister", "sees", "it", "."]
    assert lines[2].split()[:3] == ["2", "3", f"{score.line_nll()[1]:.4f}"]
    assert f"word perplexity {score.figures['word_perplexity']:.4f}, 9 words and line ends" in lines
    tokens = [
        json.loads(line)
        for line in succeed("score", trained["words"], tmp_path / "text.txt", "--per-token").splitlines()
    ]
    assert [entry["token"] for entry in tokens[:3]] == ["my", "sister", "sees"] and tokens[5]["token"] == "\n"
    assert tokens[0]["nll"] is None and [entry["line"] for entry in tokens] == [1] * 6 + [2] * 3
    assert math.isclose(sum(entry["nll"] for entry in tokens[1:]), score.figures["nll"])


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
    both = refuse("generate", trained["words"], "-", "--prompt", "x")
    assert "'once upon' is not '-'; give a prompt with --prompt TEXT" in refuse(
        "generate", trained["words"], "once upon"
    )
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
    example, _ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.DOTALL
    )  # _ needs lm_eval
    exec(example.replace("runs/mine/found", str(trained["sentencepiece"])), {})
    printed = capsys.readouterr().out
    assert "b'The church'" in printed and "['window 6', 'dense', 'linear', 'attention'] 16" in printed
