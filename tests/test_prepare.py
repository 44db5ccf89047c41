import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from models.transformer_xl import Memories
from nas.core.config import DataOptions
from nas.core.errors import InputError
from nas.data import corpus as corpus_module
from nas.data.corpus import Corpus, prepare
from nas.data.loader import ContextBatches
from nas.data.vocabulary import SentencePieceTokenizer, Vocabulary, training_lines
from nas.training.train_step import Stream


def options(source, cache, **more):
    return DataOptions(source=str(source), cache=str(cache), **more)


@pytest.fixture(scope="module")
def piece_model(text_folder, tmp_path_factory) -> Path:
    """A .model file, such as a user may provide."""
    lines = training_lines(iter([(text_folder / "train.txt").read_bytes()]), 1)
    path = tmp_path_factory.mktemp("model") / "mine.model"
    path.write_bytes(SentencePieceTokenizer.train(lines, "unigram", 300, keep_newline=True).files["tokenizer.model"])
    return path


@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize("tokenizer", ["bpe", "unigram", "bytes", "model"])
def test_round_trip_is_lossless(tokenizer, chunk, text_folder, tmp_path, piece_model, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK", chunk)  # small chunks must change nothing
    choice = str(piece_model) if tokenizer == "model" else tokenizer
    corpus = Corpus(prepare(options(text_folder, tmp_path, tokenizer=choice, vocab_size=310)))
    for split in ("train", "valid", "test"):
        assert corpus.vocabulary.decode(corpus.tokens(split)) == (text_folder / f"{split}.txt").read_bytes()
        assert corpus.meta["splits"][split]["lossless"]


def test_bpe_has_pieces_for_indentation_and_reads_unk_as_text():
    lines = ["        return <unk> , and", "        and <unk> , return"] * 50
    pieces = SentencePieceTokenizer.train(iter(lines), "bpe", 300, keep_newline=True).processor
    found = pieces.encode("        and <unk> ,", out_type=str)
    assert found[:2] == ["▁" * 8, "and"] and found[-1] == "▁," and not any("<0x" in piece for piece in found)


LOSSY = [  # options, what decoding gives, and whether the words are kept
    ({"tokenizer": "words"}, lambda text: "\n".join(" ".join(line.split()) for line in text.split("\n")), True),
    ({"tokenizer": "bytes", "lowercase": True}, str.lower, False),
    ({"tokenizer": "bytes", "newline": "drop"}, lambda text: text.replace("\n", ""), False),
]


@pytest.mark.parametrize(("choice", "expected", "words_kept"), LOSSY, ids=["words", "lowercase", "newlines"])
def test_what_a_preparation_loses_is_recorded(choice, expected, words_kept, text_folder, tmp_path):
    corpus = Corpus(prepare(options(text_folder, tmp_path, **choice)))
    about = corpus.meta["splits"]["test"]
    assert not about["lossless"] and about["words_kept"] == words_kept
    decoded = corpus.vocabulary.decode(corpus.tokens("test")).decode()
    assert decoded == expected((text_folder / "test.txt").read_text())


@pytest.mark.parametrize("choice", [{"tokenizer": "bytes"}, {"tokenizer": "words"}, {"newline": "drop"}], ids=str)
@pytest.mark.parametrize("lowercase", [True, False])
def test_the_vocabulary_encodes_as_the_preparation_does(choice, lowercase, text_folder, tmp_path):
    choice = {"vocab_size": 310, "lowercase": lowercase, **choice}
    corpus = Corpus(prepare(options(text_folder, tmp_path, **choice)))
    text = (text_folder / "valid.txt").read_text()
    np.testing.assert_array_equal(corpus.vocabulary.encode(text), corpus.tokens("valid"))
    np.testing.assert_array_equal(corpus.vocabulary.encode(text.encode()), corpus.tokens("valid"))
    counts = np.bincount(corpus.tokens("train"), minlength=corpus.vocab_size)
    assert (np.diff(counts) <= 0).all() and np.array_equal(counts, corpus.counts())  # ids are ranks
    end = corpus.vocabulary.line_end
    assert end is None if choice.get("newline") == "drop" else corpus.vocabulary.decode(np.array([end])) == b"\n"


def test_a_damaged_vocabulary_is_reported(text_folder, tmp_path):
    corpus = Corpus(prepare(options(text_folder, tmp_path, tokenizer="words")))
    folder = corpus.folder / "vocabulary"
    (folder / "words.txt").write_text("other")
    with pytest.raises(InputError, match=r"words\.txt is missing or damaged"):
        Vocabulary.load(folder)
    (folder / "ids.npy").unlink()
    with pytest.raises(InputError, match=r"ids\.npy is missing or damaged"):
        Vocabulary.load(folder)


def test_words_and_bytes_are_counted_on_the_original_text(text_folder, tmp_path):
    for choice in ({"tokenizer": "bytes"}, {"tokenizer": "words"}, {"tokenizer": "bytes", "newline": "drop"}):
        meta = Corpus(prepare(options(text_folder, tmp_path, **choice))).meta
        for split in ("train", "valid", "test"):
            text = (text_folder / f"{split}.txt").read_text()
            assert meta["splits"][split]["words"] == len(text.split()) + text.count("\n")
            assert meta["splits"][split]["bytes"] == len(text.encode())
    words = Corpus(prepare(options(text_folder, tmp_path, tokenizer="words"))).meta["splits"]["train"]
    assert words["tokens"] == words["words"]


@pytest.mark.skipif("PAR_WIKITEXT2" not in os.environ, reason="PAR_WIKITEXT2 names no folder with WikiText-2")
def test_word_counts_are_those_of_wikitext(tmp_path):
    meta = Corpus(prepare(options(os.environ["PAR_WIKITEXT2"], tmp_path, tokenizer="words", vocab_size=None))).meta
    words = {split: about["words"] for split, about in meta["splits"].items()}
    assert words == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert all(about["words_kept"] and about["tokens"] == about["words"] for about in meta["splits"].values())


def test_a_large_vocabulary_needs_wider_tokens_and_a_small_one_loses_words(tmp_path):
    path, text = tmp_path / "many.txt", "\n".join(f"w{i}" for i in range(80_000))
    path.write_text(text)
    corpus = Corpus(prepare(options(path, tmp_path / "cache", tokenizer="words", vocab_size=None)))
    decoded = corpus.vocabulary.decode(corpus.tokens("train")).decode()
    assert corpus.meta["dtype"] == "uint32" and decoded == text[: len(decoded)]
    corpus = Corpus(prepare(options(path, tmp_path / "cache", tokenizer="words", vocab_size=12)))
    assert corpus.vocab_size == 12 and not corpus.meta["splits"]["valid"]["words_kept"]
    assert b"<unk>" in corpus.vocabulary.decode(corpus.tokens("valid"))


def test_preparing_twice_is_a_cache_hit_and_changed_text_is_not(text_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(text_folder, tmp_path / "text")
    first = prepare(options(folder, tmp_path, tokenizer="bytes"))
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "write_corpus", None)  # must not be called
        assert prepare(options(folder, tmp_path, tokenizer="bytes", vocab_size=77)) == first
    with open(folder / "valid.txt", "a") as file:
        file.write("more\n")
    assert prepare(options(folder, tmp_path, tokenizer="bytes")) != first
    assert prepare(options(folder, tmp_path, tokenizer="bytes", lowercase=True)) != first


def test_a_failed_preparation_leaves_nothing_behind(text_folder, tmp_path):
    with pytest.raises(InputError, match="too large for this corpus"):
        prepare(options(text_folder, tmp_path, vocab_size=60_000))
    assert list((tmp_path / "tokens").iterdir()) == []


def test_bad_text_and_tokenizers_are_reported(text_folder, tmp_path):
    def fails(match, source=text_folder, **more):
        with pytest.raises(InputError, match=match):
            prepare(options(source, tmp_path / "cache", **more))

    fails("no such file or folder, and no known name", source=tmp_path / "nowhere")
    fails("lacks train.txt", source=tmp_path)
    empty, binary, short = tmp_path / "empty.txt", tmp_path / "binary", tmp_path / "short.txt"
    empty.write_text("")
    binary.write_bytes(b"text \xff\xfe\n" * 50)
    short.write_text("a\n")
    fails("has 0 bytes: too short to split", source=empty)
    fails("too short to split", source=short)
    told = "binary is not UTF-8 text .byte 5.; convert it, .*; data.tokenizer=bytes reads any file"
    fails(told, source=binary)
    kept = Corpus(prepare(options(binary, tmp_path / "cache", tokenizer="bytes"))).meta["splits"]["train"]
    assert kept["lossless"] and not kept["words_kept"]
    fails("bytes, words, a .model file or a vocabulary folder that exists", tokenizer="wordpiece")
    fails("is not a SentencePiece model", tokenizer=str(text_folder / "train.txt"))
    told = []
    prepare(options(text_folder, tmp_path / "cache", vocab_size=None), told.append)  # as many pieces as the text allows
    assert not any("WARNING" in text for text in told)
    same = shutil.copytree(text_folder, tmp_path / "same")
    shutil.copy(same / "valid.txt", same / "test.txt")
    prepare(options(same, tmp_path / "cache", vocab_size=None), told.append)
    assert "two of train, valid and test are the same text" in told[-1]
    fails("too small: the 256 bytes and the text's characters need", vocab_size=100)


def test_a_long_line_is_cut_between_words(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK", 50)
    path = tmp_path / "line.txt"
    path.write_text("größer als weiß nicht was " * 100)
    corpus = Corpus(prepare(options(path, tmp_path / "cache", tokenizer="words", vocab_size=None)))
    words = set(corpus.vocabulary.decode(corpus.tokens("train")).decode().split())
    assert words <= {"größer", "als", "weiß", "nicht", "was", "<unk>"}


def test_the_embedded_corpus_repeats_no_paragraph(tmp_path):
    corpus = Corpus(prepare(options("pydoc", tmp_path, tokenizer="bytes")))
    text = b"".join(corpus.vocabulary.decode(corpus.tokens(split)) for split in ("train", "valid", "test")).decode()
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 500


def test_each_pass_reads_every_token_in_contiguous_rows():
    stream, seen = Stream(ContextBatches(np.arange(107), 3, 8, beside=np.arange(107) / 2)), []
    for _ in range(107):  # 24 passes
        batch = stream.next()
        assert (batch.targets == (batch.tokens + 1) % 107).all() and (batch.beside == batch.targets / 2).all()
        assert (batch.memories is None) == (not seen)  # rows go on for ever
        stream.memories = Memories([{}], 0)
        seen.append(batch.tokens)
    first, second, _ = np.concatenate(seen, axis=1)
    assert first[:71].tolist() == list(range(71)) and second[:72].tolist() == [*range(35, 107)]
    assert (np.bincount(np.concatenate(seen).ravel()) == 24).all()
    assert {*np.concatenate(seen[: -(-107 // 24)]).ravel().tolist()} == {*range(107)}  # the steps of one pass
    own = ContextBatches(np.arange(107), 3, 8, rows=slice(1, 3))  # of one of two processes
    assert (own.next()[0] == seen[0][1:]).all() and (own.next()[0] == seen[1][1:]).all()


def test_rows_of_images_begin_with_an_image():
    batches = ContextBatches(np.arange(108), batch_size=3, segment=8, image=12)
    tokens = np.concatenate([batches.next()[0] for _ in range(12)], axis=1)
    assert tokens[:, 0].tolist() == [0, 36, 72] and (tokens[:, ::12] % 12 == 0).all()
    with pytest.raises(InputError, match=r"has 39 tokens: too short for train.batch_size=2 rows .*needs 40\)"):
        ContextBatches(np.arange(39), batch_size=2, segment=15, image=20)
    ContextBatches(np.arange(40), batch_size=2, segment=15, image=20)


def test_concurrent_preparation_ends_in_one_folder(text_folder, tmp_path):
    config = tmp_path / "config.yaml"
    content = {"source": str(text_folder), "tokenizer": "bytes", "cache": str(tmp_path / "cache")}
    config.write_text(yaml.safe_dump({"data": content}))
    command = [sys.executable, "-m", "nas.prepare", str(config)]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
