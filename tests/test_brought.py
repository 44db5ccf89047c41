"""What people bring: names, texts, caches, prompts and terminals that are unlike those of the authors."""

import fcntl
import gzip
import json
import multiprocessing
import os
import random
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import sentencepiece

from nas.core import run_folder
from nas.core.config import DataOptions
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.run_folder import TRIALS, RunFolder
from nas.data import corpus, vocabulary
from nas.data.corpus import Corpus, prepare
from nas.data.vocabulary import SentencePieceTokenizer, training_lines
from nas.inference import exporting
from nas.inference.language_model import Score
from nas.reporting import figures
from nas.search.space import make_network
from nas.search.surrogate import Point, Surrogate
from nas.training.evaluation import text_metrics
from nas.training.passes import resolve_auto
from tests.conftest import made_up_text
from tests.processes import ROOT, command_of, refuse, succeed, wait_for

NAMES = ["2024_10", "007", "12:30", "no", "1e3", "null", "~name", "Book #1", "[a", "{b", "%c", "&d", "*e", "!f", "@g"]
NAMES += ["${h}", "???", "a: b", "- x", '"q"', "it's", "naïve", "a,b", "0x1F", "1_000.5"]


@pytest.mark.parametrize("ending", ["", ".txt"])
def test_a_text_may_have_any_name(ending, small_yaml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        assert load_config(small_yaml, [f"data.source={name}{ending}"]).data.source == f"{name}{ending}"
    (tmp_path / f"Book #1{ending}").write_text(made_up_text(200, 1))
    (tmp_path / "Book").write_text(made_up_text(200, 2))
    printed = succeed(
        "prepare", small_yaml, f"data.source=Book #1{ending}", f"data.cache={tmp_path / 'c'}", cwd=tmp_path
    )
    facts = read_yaml(Path(printed.splitlines()[1].split(" (")[0]) / "meta.yaml")["splits"]
    assert sum(one["bytes"] for one in facts.values()) == len(made_up_text(200, 1).encode())


WORDS = "the old man sees the river "


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ((WORDS * 3000 + "\n").encode(), {"train": b"e ", "valid": b" ", "test": b"\n"}),  # one line
        (("日本語の文字列です。" * 4000).encode(), {}),  # no spaces
        ("".join(f"{WORDS}\0日本語\n" for _ in range(500)).encode(), {"train": b"\n", "valid": b"\n"}),
        (b"a\n" + b"b" * 30_000 + b"\n" + b"c" * 10, {}),
        (b"\r".join([WORDS.encode()] * 2000), {}),  # line ends of old Macintoshes
    ],
)
def test_a_text_is_split_where_it_can_be(text, parts, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(text)
    found = Corpus(prepare(DataOptions(source=str(path), cache=str(tmp_path / "c"), tokenizer="bpe", vocab_size=None)))
    read = {split: found.vocabulary.decode(found.tokens(split)) for split in ("train", "valid", "test")}
    assert b"".join(read.values()) == text and all(facts["lossless"] for facts in found.meta["splits"].values())
    for split, share in (("train", 0.9), ("valid", 0.05), ("test", 0.05)):
        assert len(read[split]) == pytest.approx(share * len(text), abs=0.03 * len(text))
        assert read[split].decode().encode().endswith(parts.get(split, b""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ((WORDS * 3000).encode("utf-16-le"), "has many zero bytes, like UTF-16; convert it"),
        ((WORDS * 3000).encode("utf-16"), r"not UTF-8 text \(byte 0\); .*iconv -f UTF-16 -t UTF-8"),
        ((WORDS * 3000).encode("utf-32-be"), "has many zero bytes"),
        (
            (WORDS * 20).encode() + b"caf\xe9 " + (WORDS * 3000).encode(),
            r"error: [^:]*not UTF-8 text \(byte 543\)",
        ),
        ((WORDS * 30).encode() + bytes(4096), "remove the zero bytes"),
        (gzip.compress(random.Random(1).randbytes(9000)), "unpack it, as with gunzip"),
        (b"\n" * 5000, "has nothing but line ends"),
        (b"ab", "too short to split 90/5/5"),
    ],
)
def test_what_is_no_text_is_named(text, message, small_yaml, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(text)
    options = f"data.source={path}", f"data.cache={tmp_path / 'c'}", "data.tokenizer=bpe", "data.vocab_size=400"
    assert re.search(message, refuse("prepare", small_yaml, *options))


@pytest.mark.parametrize(("method", "rule"), [("bpe", "identity"), ("unigram", "identity"), ("bpe", "nmt_nfkc")])
def test_words_have_the_ids_that_sentencepiece_gives_to_their_line(method, rule, monkeypatch):
    monkeypatch.setitem(vocabulary.LOSSLESS, "normalization_rule_name", rule)
    source, parts = (
        random.Random(1),
        ["a", "b", " ", "  ", "\t", "ä", "日", "\u00a0", "<unk>", "\u0301", "<0x0A>", "x="],
    )
    junk = [
        "".join(source.choices([*parts, "\u2047", "\0", "\r", "\u2028"], k=source.randint(0, 30))) for _ in range(2000)
    ]
    lines = [*made_up_text(300).split("\n"), *Path(__file__).read_text().split("\n"), *junk]
    tokenizer = SentencePieceTokenizer.train(lines[:-1000], method, 700, True)
    expected = [[*tokenizer.processor.encode(line), tokenizer.line_end] for line in lines]
    text = "\n".join([*lines, ""]).encode()
    assert tokenizer.encode(text).tolist() == [token for line in expected for token in line]
    if rule != "identity":
        return
    marked = text.replace(b"<unk>", "a\u2581 \u2581b".encode())  # SentencePiece's own sign for a space
    assert tokenizer.decode(tokenizer.encode(marked)) == marked and tokenizer.is_exact


@pytest.mark.parametrize("method", ["bpe", "unigram"])
def test_a_rare_space_is_a_space(method):
    lines = [">one part of it", *("".join(random.Random(line).choices("ACGT", k=60)) for line in range(3000))]
    tokenizer = SentencePieceTokenizer.train(lines, method, 300, True)
    assert tokenizer.decode(tokenizer.encode(lines[0].encode())) == lines[0].encode()


def test_lines_with_bars_are_learned():
    """findings/sentencepiece-skipped-lines.sh"""
    text = "quagga \u2585 quagga\n" * 400
    learned = SentencePieceTokenizer.train(training_lines(iter([text.encode()]), len(text)), "bpe", 275, True)
    assert b"quagga" in learned.pieces and learned.decode(learned.encode(text.encode())) == text.encode()


def test_a_cache_serves_several_people(tmp_path, text_folder):
    """The text that one account has prepared is read by another one, which cannot write."""
    tmp_path.chmod(0o755)
    options = DataOptions(source=str(text_folder), cache=str(tmp_path / "cache"), tokenizer="bytes")
    before = os.umask(0o027)
    try:
        folder = prepare(options)
    finally:
        os.umask(before)
    assert (folder.stat().st_mode | (folder / "train.bin").stat().st_mode) & 0o777 == 0o750
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def other_account() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        for path in text_folder.iterdir():
            path.read_bytes()
        assert prepare(options) == folder and len(Corpus(folder).tokens("train")) > 1000
        with pytest.raises(InputError, match=r"data\.cache=.*cache cannot be written: Permission denied; give another"):
            prepare(DataOptions(source=str(text_folder), cache=options.cache, tokenizer="words"))

    for path in (text_folder, *text_folder.parents) if os.getuid() == 0 else ():
        if "pytest-of-" in str(path):
            path.chmod(path.stat().st_mode | 0o055)
    process = multiprocessing.get_context("fork").Process(target=other_account)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_waiting_for_a_cache_and_a_cache_without_locks_are_told(tmp_path, text_folder, monkeypatch):
    options, told = DataOptions(source=str(text_folder), cache=str(tmp_path), tokenizer="bytes"), []
    lock = os.open(tmp_path / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    thread = threading.Thread(target=prepare, args=(options, told.append))
    thread.start()
    wait_for(lambda: told)
    assert told == [f"waiting for another process that prepares a text in {tmp_path}"] and not list(tmp_path.glob("t*"))
    os.close(lock)
    thread.join()

    def refuse_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    words = DataOptions(source=str(text_folder), cache=str(tmp_path), tokenizer="words")
    folder = prepare(words, told.append)
    assert any("has no locks (No locks available)" in line for line in told) and len(Corpus(folder).tokens("test"))


def test_a_preparation_that_is_killed_keeps_its_finished_splits(tmp_path, text_folder, monkeypatch):
    encode, splits = corpus.encode_split, []
    options = DataOptions(source=str(text_folder), cache=str(tmp_path / "a"), tokenizer="bpe", vocab_size=310)

    def encode_split(path, *more):
        splits.append(path.stem)
        if splits == ["train", "valid"]:
            raise KeyboardInterrupt
        return encode(path, *more)

    monkeypatch.setattr(corpus, "encode_split", encode_split)
    with pytest.raises(KeyboardInterrupt):
        prepare(options)
    folder = prepare(options)
    assert splits == ["train", "valid", "valid", "test"]
    monkeypatch.undo()
    whole = prepare(DataOptions(source=str(text_folder), cache=str(tmp_path / "b"), tokenizer="bpe", vocab_size=310))
    for file in (file for file in whole.rglob("*") if file.is_file()):
        assert file.read_bytes() == (folder / file.relative_to(whole)).read_bytes(), file
    assert len([*folder.rglob("*")]) == len([*whole.rglob("*")])


@pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux only")
def test_two_processes_encode_as_one_does_even_if_one_ends(tmp_path, text_folder, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 300)
    encode, parent, chunks, senders = corpus.encode_chunk, os.getpid(), [], []

    def encode_chunk(chunk, *more):
        if os.getpid() != parent and chunk == ends_at:
            os.write(senders[-1].fileno(), b"\0\0\1\0...")  # the beginning of a message
            os._exit(1)
        chunks.append(chunk)  # those of this process
        return encode(chunk, *more)

    def pipe(duplex):
        receiver, sender = multiprocessing.Pipe(duplex)
        senders.append(sender)
        return receiver, sender

    monkeypatch.setattr(corpus, "encode_chunk", encode_chunk)
    monkeypatch.setattr(corpus, "Pipe", pipe)
    monkeypatch.setattr(corpus, "count_cores", lambda: 2)
    folders = {}
    for name, least in (("one", 1 << 40), ("two", 0), ("ended", 0)):
        ends_at = folders["one"][1][5] if name == "ended" else None
        monkeypatch.setattr(corpus, "SHARED", least)
        options = DataOptions(source=str(text_folder), cache=str(tmp_path / name), tokenizer="bpe", vocab_size=310)
        folders[name], chunks = (prepare(options), chunks), []
    every = folders["one"][1]
    train = (text_folder / "train.txt").read_bytes()
    of_train = next(index for index in range(len(every)) if b"".join(every[: index + 1]) == train) + 1
    assert folders["two"][1][: (of_train + 1) // 2] == every[:of_train:2]
    assert folders["ended"][1][: of_train - 2] == [*every[0:5:2], *every[5:of_train]][: of_train - 2]
    for file in (file for file in folders["one"][0].rglob("*") if file.is_file()):
        for folder in (folders["two"][0], folders["ended"][0]):
            assert file.read_bytes() == (folder / file.relative_to(folders["one"][0])).read_bytes(), file


def test_a_damaged_copy_in_the_cache_is_made_again(tmp_path, text_folder):
    options, told = DataOptions(source=str(text_folder), cache=str(tmp_path), tokenizer="bpe", vocab_size=310), []
    folder = prepare(options)
    whole = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for file, content in whole.items():
        for damaged in (content[: len(content) // 2], bytes(len(content)), b""):
            file.write_bytes(damaged)
            assert prepare(options, told.append) == folder
            assert told.pop(0) == f"WARNING: {folder} is damaged, so it is made again" and len(told) == 1, file
            told.clear()
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == whole
    assert prepare(options, told.append) == folder and not told
    for damaged in (None, b"ri", b"....", b""):
        if damaged is not None:
            (folder / "kept").write_bytes(damaged)
        assert Corpus(folder).keep("kept", lambda file: file.write_text("ripe")).read_text() == "ripe", damaged


def in_ascii(name: str, *arguments, **more) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", f"nas.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=True, **more)


def test_terminals_and_line_ends_of_other_kinds_stop_no_command(trained, tmp_path):
    text = tmp_path / "naïve.txt"
    text.write_text("my sister sees the naïve king\u2028the old man 好\n\u2581 of the\r\n")
    assert b"na\\xefve king\\u2028the" in in_ascii("score", trained["sentencepiece"], text).stdout
    lines = in_ascii("score", trained["sentencepiece"], text, "--per-token").stdout.splitlines()
    tokens = "".join(json.loads(line)["token"] for line in lines).encode()
    assert b"\\xe5" in tokens  # a byte of 好
    assert re.sub(rb"\\x(..)", lambda byte: bytes([int(byte[1], 16)]), tokens) == text.read_bytes()
    new = in_ascii("generate", trained["bytes"], "--prompt", "naïve 好", "--tokens", "40", "--seed", "1").stdout
    assert new.startswith(b"na\\xefve \\u597d")


def test_output_that_no_one_reads_ends_no_work(trained, small_yaml, tmp_path):
    """As `prepare ... | true`, and `>&-`."""
    for number, closed in enumerate(("| true", ">&-")):
        command = [sys.executable, "-u", *command_of("prepare", small_yaml, f"data.cache={tmp_path / str(number)}")]
        command = ["bash", "-c", f"set -o pipefail; {shlex.join(command)} {closed}"]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b""), closed
        assert len([*(tmp_path / str(number)).glob("tokens/*/meta.yaml")]) == 1
    wrong = refuse("retrain", trained["words"].parent / "pattern.yaml", small_yaml, "--run", f"{tmp_path}/L\udcfcb")
    assert "the name is no utf-8 text; give another one" in wrong


def test_prompts_are_read_as_they_are(trained, tmp_path):
    short = "--tokens", "1", "--temperature", "0"
    for prompt in ("use --train.lr=3 here", "a --a.b= c", "path/--x.y=/z"):
        assert succeed("generate", trained["sentencepiece"], "--prompt", prompt, *short).startswith(prompt)
    wrong = refuse("generate", trained["sentencepiece"], "--prompt", "--train.lr=3", *short)
    assert "write --prompt=VALUE if the value begins with a dash" in wrong
    assert succeed("generate", trained["sentencepiece"], "--prompt=--train.lr=3", *short).startswith("--train.lr=3")
    assert "cannot read : " in refuse("generate", trained["bytes"], "--prompt-file", "", *short)
    for end in ("", "\n", "\r\n"):
        (tmp_path / "prompt").write_bytes(b"\xef\xbb\xbfmy sister" + end.encode())
        given = "--prompt-file", tmp_path / "prompt"
        assert succeed("generate", trained["bytes"], *given, *short) == succeed(
            "generate", trained["bytes"], "--prompt", "my sister", *short
        )
    assert succeed("generate", trained["bytes"], "--prompt=--", "--stop=--", *short).startswith("--")
    (tmp_path / "cut").write_bytes("the old man\n\nthe ä".encode()[:-1])
    wrong = refuse("score", trained["sentencepiece"], tmp_path / "cut")
    assert "not UTF-8 (byte 17); it ends within a character, as after head -c: remove its last byte" in wrong
    (tmp_path / "mac").write_bytes(b"the old\rman\x1b[2J")
    assert r"  the old\rman\x1b[2J" in succeed("score", trained["bytes"], tmp_path / "mac")
    (tmp_path / "wide").write_bytes("the old man\n".encode("utf-16-le"))
    for wide in (("score", tmp_path / "wide"), ("generate", "--prompt-file", tmp_path / "wide")):
        assert "iconv -f UTF-16LE" in refuse(wide[0], trained["sentencepiece"], *wide[1:])
    command = [sys.executable, "-m", "nas.generate", trained["words"], "-", *short, "--stop", "x", "--top-k", "0"]
    done = subprocess.run(command, input=b"my sister unheard-of\n", capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(b"my sister unheard-of ") and b"it reads unheard-of as <unk>" in done.stderr


def test_a_huge_word_perplexity_is_not_compared():
    facts = {"words_kept": True, "lossless": True}
    assert text_metrics(2e4, 1000, facts | {"words": 1000, "bytes": 6100})["word_perplexity_comparable"]
    assert not text_metrics(2e5, 1000, facts | {"words": 1000, "bytes": 6100})["word_perplexity_comparable"]


def test_a_picture_is_whole_or_missing(tmp_path, monkeypatch):
    def write_part(file, *_, **__):
        file.write(b"GIF89a")
        raise KeyboardInterrupt

    lines = [{"step": step, "temperature": 1.0, "operations": ["a", "b"], "pi": [[0.5, 0.5]]} for step in range(3)]
    for name, draw in (("imwrite", figures.animate), ("savefig", figures.final_pi)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(imageio, "imwrite", write_part)
            patch.setattr(figures.Figure, "savefig", lambda self, *given, **more: write_part(*given))
            draw(lines, tmp_path / "picture.gif" if name == "imwrite" else tmp_path / "picture.png")
    assert [*tmp_path.iterdir()] == []
    assert figures.animate(lines[:1], tmp_path / "still.gif") == 1  # of a search with one network


def test_the_command_that_began_a_search_is_recorded(small_config, tmp_path):
    config = small_config()
    facts = {"data_sha256": {}, "tokenizer_sha256": None, "vocab_size": 3}
    for command in ("search.py", "search.py --resume", "search.py --resume again"):
        run = RunFolder(tmp_path / TRIALS, config, "search")
        run.start(config, facts | {"command": command})
        os.close(run.lock)
    RunFolder(tmp_path, config, "search").start(config, facts | {"command": "search.py --resume again"})
    recorded = read_yaml(tmp_path / "provenance.yaml")
    assert recorded["command"] == "search.py"
    assert [one["command"] for one in recorded["resumed"]] == ["search.py --resume", "search.py --resume again"]


def test_an_export_that_is_stopped_is_repeated(trained, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(exporting, "model_card", stop)
        exporting.export(trained["sentencepiece"], tmp_path / "out")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [".unfinished"]
    (mine := tmp_path / "out.part").mkdir()
    (mine / "draft.txt").touch()
    inode = (tmp_path / "out").stat().st_ino  # it may be a mounted disk, which nothing can replace
    exporting.export(trained["sentencepiece"], tmp_path / "out")
    assert (tmp_path / "out" / "README.md").exists() and not list(tmp_path.glob("out/.*"))
    assert (mine / "draft.txt").exists() and (tmp_path / "out").stat().st_ino == inode
    with pytest.raises(InputError, match="is not an empty folder"):
        exporting.export(trained["sentencepiece"], tmp_path / "out")


def test_files_that_are_none_and_links_that_lead_nowhere_are_named(small_yaml, trained, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is no file; write its text to one" in refuse("prepare", small_yaml, f"data.source={tmp_path / 'pipe'}")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for option in (f"data.cache={tmp_path / 'link'}", f"data.cache={tmp_path / 'link' / 'mine'}"):
        assert f"link is a link to {tmp_path / 'disk'}, which does not exist" in refuse("prepare", small_yaml, option)
    (tmp_path / "latin.yaml").write_bytes("data: {source: Bücher}".encode("latin-1"))
    assert "is not UTF-8 (byte 16); convert it" in refuse("prepare", tmp_path / "latin.yaml")
    command = [sys.executable, "-m", "nas.generate", trained["bytes"], "--prompt-file", "-", "--tokens", "3"]
    command += ["--seed", "1", "--out", "/dev/stderr"]
    done = subprocess.run(command, input=b"my sister", capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(b"my sister") and done.stderr.startswith(done.stdout[len(b"my sister") : -1])


def test_a_checkout_around_the_program_is_not_its_own(tmp_path, monkeypatch):
    """As of an archive, unpacked in another repository."""
    package = tmp_path / "own" / "nas" / "core"
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    about = ["-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "--allow-empty", "--message", "c"]
    subprocess.run(["git", "-C", tmp_path, *about], check=True)
    package.mkdir(parents=True)
    monkeypatch.setattr(run_folder, "__file__", str(package / "run_folder.py"))
    assert run_folder.git_commit() is None
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "nas" / "core" / "run_folder.py"))
    (tmp_path / "nas" / "core").mkdir(parents=True)
    assert len(run_folder.git_commit()) == 40


def test_a_tokenizer_without_bytes_tells_what_it_does_not_read(tmp_path, text_folder, small_yaml):
    sentencepiece.SentencePieceTrainer.train(
        input=str(text_folder / "train.txt"), model_prefix=str(tmp_path / "own"), vocab_size=60, minloglevel=2
    )
    own = "data.vocab_size=null", f"data.tokenizer={tmp_path / 'own.model'}"
    (tmp_path / "pattern.yaml").write_text("format: par-pattern/2\nblocks: [dense]\n")
    succeed("retrain", tmp_path / "pattern.yaml", small_yaml, "--run", tmp_path / "run", *own, "train.steps=2")
    command = [sys.executable, "-m", "nas.generate", tmp_path / "run", "--prompt", "the 😀 k好", "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=True, text=True)
    assert "it reads 😀 as ⁇, k好 as k ⁇\n" in done.stderr
    (tmp_path / "text").write_text("my sister sees the king\nthe old man\n")
    lines = succeed("score", tmp_path / "run", tmp_path / "text", "--per-token").splitlines()
    assert "".join(json.loads(line)["token"] for line in lines) == (tmp_path / "text").read_text()
    (tmp_path / "own.model").write_bytes(b"")
    assert "own.model is not a SentencePiece model" in refuse("prepare", small_yaml, *own)


def test_a_prompt_may_end_in_the_indentation_of_a_line(tmp_path, small_yaml, pattern):
    """`if` follows the spaces in every line, and they are a piece of their own."""
    (tmp_path / "code.txt").write_text("def sees(man):\n        if man:\n        if not man:\n" * 400)
    own = "data.tokenizer=bpe", "data.vocab_size=290", f"data.source={tmp_path / 'code.txt'}", "train.steps=150"
    succeed("retrain", pattern, small_yaml, "--run", tmp_path / "run", *own, "train.batch_size=8")
    greedy = "--tokens", 6, "--temperature", 0
    whole = succeed("generate", tmp_path / "run", "--prompt", "def sees(man):\n", *greedy)
    for spaces in (1, 5, 8):
        start = f"def sees(man):\n{' ' * spaces}"
        assert succeed("generate", tmp_path / "run", "--prompt", start, *greedy)[:30] == whole[:30], spaces


def test_an_account_without_a_home_and_one_byte_of_another_encoding_are_told(small_yaml, tmp_path):
    text = "der König sieht die Bücher über Äpfel\n" * 2000
    (tmp_path / "mixed.txt").write_bytes(text.encode()[:-20] + b"\x92\n")
    place, wrong = len(text.encode()) - 20, refuse("prepare", small_yaml, f"data.source={tmp_path / 'mixed.txt'}")
    assert f"is not UTF-8 text (byte {place}); the rest is UTF-8, so correct or remove such bytes, as with" in wrong
    alone = ["unshare", "--user", "--map-user=4242", "env", "-u", "HOME", sys.executable, *command_of("prepare")]
    done = subprocess.run([*alone, small_yaml, "data.cache=~/c"], cwd=ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip("there are no user namespaces here")
    assert done.stderr.startswith("error: ~/c: this account has no home folder; give a path without ~")


def test_figures_go_where_they_are_sent(searched, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in searched.rglob("*")}
    succeed("animate", searched, "--out", tmp_path / "other.gif")
    assert {path: path.stat().st_mtime_ns for path in searched.rglob("*")} == before
    assert {"other.gif", "pi.png", "pattern.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "there is no folder" in refuse("animate", searched, "--out", tmp_path / "missing" / "other.gif")


def test_numbers_at_the_edge(small_config, memory_corpus):
    facts = {"words_kept": True, "lossless": True, "words": 1, "bytes": 5}
    ids = np.zeros(2_000_000, int)
    long = Score([b"a b"], ids, ids, np.ones(len(ids)), text_metrics(2e6, len(ids), facts))
    assert repr(long).splitlines()[1].split() == ["1", "2000000", "2000000.0000", "a", "b"]
    networks = [make_network(100, 16, blocks) for blocks in (["attention"], ["dense"])]
    surrogate = Surrogate([Point(networks[0], 1.0, 0.0)], networks, 64)
    assert np.isfinite(surrogate.predict(networks)).all()
    tokens = np.arange(400) % 2
    config = small_config("model.cutoffs=auto")
    assert resolve_auto(config, memory_corpus(2, tokens, tokens)).model.cutoffs == []
    with pytest.raises(InputError, match=r"temperature.end=1e-38 must be a number of at least 0.001"):
        small_config("search.temperature.end=1e-38")
    with pytest.raises(InputError, match=r"data.cache=null must be text"):
        small_config("data.cache=")
    assert small_config("train.steps=010", "seed=0x1F", "train.lr=1e-3").train.steps == 10
    with pytest.raises(InputError, match=r"train.steps=1:30 must be"):
        small_config("train.steps=1:30")
