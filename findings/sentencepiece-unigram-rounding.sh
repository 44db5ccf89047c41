#!/usr/bin/env bash
# The pieces of a word in a unigram model depend on the words before it, although no piece crosses a space.
# Guess: the best path through a line is that of its words, because no piece goes on after a space. So words can be
# cached.
# Seen: a word whose pieces have the same scores in two orders takes one of them by what stands before in the line. BPE
# has no such lines.
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
words = ["".join(source.choices("abcde", k=source.randint(1, 9))) for _ in range(300)]
lines = [" ".join(source.choices(words, k=40)) for _ in range(1000)]
for kind in ("bpe", "unigram"):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:500]), model_writer=model, model_type=kind, vocab_size=120,
        add_dummy_prefix=False, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    crossing = [index for index in range(120) if "\u2581" in processor.id_to_piece(index)[1:]]
    junk = [" ".join("".join(source.choices("abcde", k=source.randint(1, 30))) for _ in range(60)) for _ in range(3000)]
    unlike = 0
    for line in junk:
        first, *others = line.split(" ")
        by_word = processor.encode(first) + [token for word in others for token in processor.encode(f" {word}")]
        by_line = processor.encode(line)
        unlike += by_word != by_line
        assert sorted(by_word) == sorted(by_line)
    print(f"{kind}: {len(crossing)} pieces cross a space; {unlike} of {len(junk)} lines differ from their words")
    assert not crossing and (unlike > 0) == (kind == "unigram")
END
