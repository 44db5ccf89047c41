#!/usr/bin/env bash
# SentencePiece turns U+2581 of a text into a space, even where a model is meant to be lossless.
# Guess: with normalization_rule_name=identity, byte_fallback and no dummy prefix, each text comes back as it was.
# Seen: U+2581 is read as the sign for a space. Its three byte pieces decode to it, so who encodes it as these loses
# nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sentencepiece==0.2.3
cd "$folder"
venv/bin/python - <<'END'
import io

import sentencepiece

model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a b", "b a"] * 50), model_writer=model, model_type="bpe", vocab_size=280,
    byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
    hard_vocab_limit=False, minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
for text in ("a\u2581b", "a\u2582b"):
    print(f"{text!a} -> {processor.encode(text, out_type=str)!a} -> {processor.decode(processor.encode(text))!a}")
assert processor.decode(processor.encode("a\u2581b")) == "a b"
assert processor.decode(processor.encode("a\u2582b")) == "a\u2582b"
marks = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
assert processor.decode(processor.encode("a") + marks + processor.encode("b")) == "a\u2581b"
END
