#!/usr/bin/env bash
# An output layer is tied to the embedding, and its bias is longer than the vocabulary, as that of an adaptive softmax, whose
# clusters have biases too. Guess: tying weights changes weights only.
# Seen: Transformers 5.24.0 cuts the bias to the rows of the tied weight, without a word, when the model is made.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$folder/tie.py" <<'END'
import torch
from transformers import PretrainedConfig, PreTrainedModel


class Head(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = weight, torch.nn.Parameter(torch.zeros(10))  # 8 tokens and 2 clusters


class Model(PreTrainedModel):
    config_class = PretrainedConfig
    _tied_weights_keys = {"head.weight": "embedding.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = Head(self.embedding.weight)
        self.post_init()


found = {tied: len(Model(PretrainedConfig(tie_word_embeddings=tied)).head.bias) for tied in (False, True)}
print(found)
assert found == {False: 10, True: 8}, found
END
HF_HOME="$folder" "$folder/venv/bin/python" "$folder/tie.py"
