#!/usr/bin/env bash
# A BPE of tokenizers without an unknown token drops characters that it does not know, and joins what stands around
# them.
# Guess: without unk_token such a text is refused, as WordLevel and Unigram do, or at least nothing merges over the
# gap.
# Seen: "a?b" becomes the single token "ab". byte_fallback does the same where a byte has no token.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cd "$folder"
venv/bin/python - <<'END'
from tokenizers import Tokenizer, models

vocabulary, merges = {"a": 0, "b": 1, "ab": 2}, [("a", "b")]
for more in ({}, {"byte_fallback": True}):
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **more)).encode("a?b")
    print(f"{more}: {found.tokens} at {found.offsets}")
    assert found.tokens == ["ab"]
for model in (models.WordLevel({"a": 0}), models.Unigram([("a", -1.0)])):
    try:
        Tokenizer(model).encode("?")
    except Exception as error:
        print(f"{type(model).__name__}: {error}")
    else:
        raise AssertionError("not refused")
END
