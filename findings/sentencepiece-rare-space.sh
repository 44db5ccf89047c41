#!/usr/bin/env bash
# A space that is rare in the training text comes back from SentencePiece as U+2581.
# Guess: with byte_fallback and no normalisation, any text is decoded as it was, because a rare character has bytes.
# Seen: the bytes are those of U+2581, which stands for a space, and decoding them gives U+2581. character_coverage=1
# or required_chars gives the space a piece.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sentencepiece==0.2.3
cd "$folder"
venv/bin/python - <<'END'
import io
import random

import sentencepiece

source = random.Random(1)
lines = [">one part of it", *("".join(source.choices("ACGT", k=60)) for _ in range(3000))]
found = {}
for name, more in (("default", {}), ("coverage", {"character_coverage": 1.0}), ("required", {"required_chars": "\u2581"})):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=300, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False, minloglevel=2, **more,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    found[name] = processor.decode(processor.encode(lines[0]))
print(ascii(found))
assert found["default"] == lines[0].replace(" ", "\u2581") != lines[0]
assert found["coverage"] == found["required"] == lines[0]
END
