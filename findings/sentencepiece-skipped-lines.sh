#!/usr/bin/env bash
# The trainer of SentencePiece skips each line that holds U+2585, a block that bars and charts are drawn with.
# Guess: the character is a character: if it has no piece, bytes stand for it, and the rest of the line is learned.
# Seen: a word of 400 lines gets no piece, because each of these lines holds U+2585.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sentencepiece==0.2.3
cd "$folder"
venv/bin/python - <<'END'
import io

import sentencepiece


def pieces(mark):
    model, lines = io.BytesIO(), ["plain words here"] * 50 + [f"quagga {mark} quagga"] * 400
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=330, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return processor.encode("quagga", out_type=str), processor.decode(processor.encode(f"a {mark} b"))


for mark in ("\u2584", "\u2585"):
    print(f"U+{ord(mark):04X}: {pieces(mark)}")
assert pieces("\u2584")[0] == ["\u2581quagga"]
assert len(pieces("\u2585")[0]) > 1
END
