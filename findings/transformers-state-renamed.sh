#!/usr/bin/env bash
# A model with code of its own returns its state as past_key_values, and reads it there in prepare_inputs_for_generation().
# Guess: generate() of every Transformers 5 hands it on by that name, as its deprecation warning says.
# Seen: 5.23.0 does. 5.24.0 calls the state `cache` there, so the model gets None at each step, reads the whole text again,
# and is slow without an error. (A parameter `cache` as well as past_key_values works with both.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/count.py" <<'END'
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Counts(PreTrainedModel, GenerationMixin):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight, self.states, self.read = torch.nn.Linear(1, 1), [], []
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **others):
        self.states.append(past_key_values)
        return {"input_ids": input_ids if past_key_values is None else input_ids[:, -1:]}

    def forward(self, input_ids, **others):
        self.read.append(input_ids.shape[1])
        return CausalLMOutputWithPast(logits=torch.zeros(*input_ids.shape, 8), past_key_values="state")


model = Counts(PretrainedConfig(vocab_size=8)).eval()
model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3, do_sample=False)
print(model.states, model.read)
END
for version in 5.23.0 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers=="$version"
    found=$(HF_HOME="$folder" "$folder/$version/bin/python" "$folder/count.py" 2> /dev/null)
    echo "$version: $found"
    case $version in
        5.23.0) [ "$found" = "[None, 'state', 'state'] [3, 1, 1]" ] ;;
        5.24.0) [ "$found" = "[None, None, None] [3, 4, 5]" ] ;;
    esac
done
