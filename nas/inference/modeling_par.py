"""A model of par-nas in Transformers: a stream that generate() reads token by token, with a mixture if it has one.

Shape letters as in models/relative_attention.py, and V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from models.operations.operation import BlockConfig
from models.stream import StreamModel
from models.transformer_xl import Memories, build_pattern
from nas.mixture.distribution import Distribution, Stream

# The field of outputs that generate() hands on was past_key_values before Transformers 5.24.
CARRIED = next(name for name in ("cache", "past_key_values") if name in CausalLMOutputWithPast.__dataclass_fields__)


class ParConfig(PretrainedConfig):
    """Args:
    pattern: the name and the sizes of each block's operation.
    block: the fields of BlockConfig. backbone: other options of TransformerXL.
    segment, memory: positions that an evaluation reads at once, and those before them that attention sees.
    mixture: settings of the mixture, and the shapes and types of its arrays; None: no mixture.
    training: the options of the training, from which par-nas goes on.
    """

    model_type = "par"

    def __init__(
        self,
        pattern=(),
        block=None,
        backbone=None,
        segment: int = 64,
        memory: int = 64,
        mixture: dict | None = None,
        training: dict | None = None,
        vocab_size: int = 256,
        **others,
    ):
        self.pattern, self.block, self.backbone = [*pattern], block or {"d_model": 64}, backbone or {}
        self.segment, self.memory, self.mixture, self.training = segment, memory, mixture, training
        self.vocab_size = vocab_size
        # What other tools ask for. A stream has no end, but some need one.
        self.hidden_size, self.num_hidden_layers = self.block["d_model"], len(self.pattern)
        self.max_position_embeddings = others.pop("max_position_embeddings", 1 << 16)
        super().__init__(**others)


@dataclass
class Part:
    """Rows of a batch that have read the same number of tokens.

    state: of StreamModel; in training Memories. skip: columns of the next tokens that are padding.
    """

    rows: list[int]
    state: dict[str, Tensor] | Memories | None
    skip: int = 0


@dataclass
class ParState:
    """What was read of each row. length: columns of the batch that were read, with padding. streams: of the mixture."""

    parts: list[Part]
    streams: list[Stream]
    length: int = 0
    is_compileable = is_croppable = False  # generate() asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, rows: Tensor) -> None:
        """Row i goes on from row rows[i], as beam search asks."""
        chosen, parts = rows.tolist(), []
        for part in self.parts:
            if new := [row for row, old in enumerate(chosen) if old in part.rows]:
                places = torch.tensor([part.rows.index(chosen[row]) for row in new], device=rows.device)
                state = {name: own if name == "start" else own[places] for name, own in part.state.items()}
                parts.append(Part(new, state))
        self.parts, self.streams = parts, [self.streams[row].copy() for row in chosen] if self.streams else []


class MixtureArrays(nn.Module):
    """The arrays of a mixture, as buffers, so that they lie in model.safetensors. settings: of ParConfig."""

    def __init__(self, settings: dict):
        super().__init__()
        self.settings = settings
        for name, (dtype, shape) in settings["arrays"].items():
            self.register_buffer(f"array_{name}", torch.empty(shape, dtype=getattr(torch, dtype)))

    def distribution(self) -> Distribution:
        arrays = {name.removeprefix("array_"): own.cpu().numpy() for name, own in self.named_buffers()}
        return Distribution(self.settings | arrays, arrays)


class ParForCausalLM(PreTrainedModel, GenerationMixin):
    """In evaluation mode the whole predictor, with its mixture, without gradients; in training the network alone."""

    config_class = ParConfig
    _tied_weights_keys = {"network.head.weight": "network.embedding.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["mixture"]  # noqa: RUF012
    _is_stateful = True  # generate() cannot go back

    def __init__(self, config: ParConfig):
        super().__init__(config)
        block = BlockConfig(**config.block)
        self.network = build_pattern([*map(tuple, config.pattern)], block, config.vocab_size, **config.backbone)
        self.mixture = MixtureArrays(config.mixture) if config.mixture else None
        self.made = None, None  # versions of the weights, and what was made of them
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The constructor of the network draws its weights."""

    def _adjust_bias(self, *layers: nn.Module) -> None:
        """Transformers would cut off the bias of the clusters."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise ValueError("the vocabulary of this model cannot change")

    def get_output_embeddings(self) -> None:
        return None

    def prepare_inputs_for_generation(
        self, input_ids, cache=None, past_key_values=None, attention_mask=None, use_cache=True, **others
    ):
        state = cache if cache is not None else past_key_values
        new = input_ids if state is None else input_ids[:, state.length :]
        keep = {"logits_to_keep": others["logits_to_keep"]} if "logits_to_keep" in others else {}
        return {"input_ids": new, "attention_mask": attention_mask, "cache": state, "use_cache": use_cache, **keep}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: ParState | None = None,
        past_key_values: ParState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
        **others,
    ) -> CausalLMOutputWithPast:
        """input_ids [B, L]: the next tokens of each row. attention_mask: zeros before a text are padding. The logits
        [B, L, V] are log-probabilities.

        cache: the state that the call before returned; it changes. labels [B, L]: as input_ids, or -100; the loss is
        that of labels[:, 1:]. logits_to_keep: only the last positions get logits; 0: all of them.
        """
        if others.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds are not possible, because cache and n-grams need the tokens")
        state = cache if cache is not None else past_key_values
        if attention_mask is not None:  # padding has no embedding
            input_ids = input_ids.masked_fill(attention_mask[:, -input_ids.shape[1] :] == 0, 0)
        if state is None:
            state = self.begin(input_ids, attention_mask)
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            hidden = self.read(input_ids, state)
            kept = hidden[:, -logits_to_keep:]
            log_p = self.network.head.log_probabilities(kept.flatten(0, 1)).unflatten(0, kept.shape[:2])
        if state.streams:
            log_p = self.mix(input_ids, hidden, log_p, state)
        state.length += input_ids.shape[1]
        for part in state.parts:
            part.skip = 0
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=log_p, labels=labels, vocab_size=self.config.vocab_size, **others)
        state = None if self.training or use_cache is False else state
        output = CausalLMOutputWithPast(loss=loss, logits=log_p, **{CARRIED: state})
        return output if return_dict else output.to_tuple()

    def begin(self, input_ids: Tensor, attention_mask: Tensor | None) -> ParState:
        """The state before the first tokens. Rows with the same padding are read together."""
        rows, length = input_ids.shape
        padding = [0] * rows
        if attention_mask is not None:
            padding = (attention_mask.cumsum(dim=1) == 0).sum(dim=1).tolist()
        parts, (stream, beside) = [], (None, None) if self.training else self.made_of_weights()
        for skip in dict.fromkeys(padding):
            own = [row for row, other in enumerate(padding) if other == skip]
            parts.append(Part(own, stream.start(len(own)) if stream else None, skip % length))  # never all of them
        return ParState(parts, [Stream(beside) for _ in range(rows)] if beside else [])

    def read(self, input_ids: Tensor, state: ParState) -> Tensor:
        """The inputs of the output layer [B, L, D], zeros for padding. Segments are those of an evaluation."""
        segment, stream = self.config.segment, None if self.training else self.made_of_weights()[0]
        found = self.network.embedding.weight.new_zeros(*input_ids.shape, self.config.hidden_size)
        for part in state.parts:
            tokens, pieces = input_ids[part.rows, part.skip :], []
            for piece in tokens.split(segment, dim=1):
                if stream:
                    hidden, part.state = stream.hidden(piece, part.state, min(tokens.shape[1], segment))
                else:
                    hidden, part.state = self.network.read(piece, part.state, self.config.memory)
                pieces.append(hidden)
            found[part.rows, part.skip :] = torch.cat(pieces, dim=1)
        return found

    def mix(self, input_ids: Tensor, hidden: Tensor, log_p: Tensor, state: ParState) -> Tensor:
        """The log-probabilities [B, K, V] of the mixture, for the last K = log_p.shape[1] positions."""
        states, found = hidden.float().cpu().numpy(), log_p.float().cpu().numpy().copy()
        first = input_ids.shape[1] - found.shape[1]
        for part in state.parts:
            for row in part.rows:
                for place, token in enumerate(input_ids[row, part.skip :].tolist(), start=part.skip):
                    state.streams[row].add(token, states[row, place])
                    if place >= first:
                        mixed = state.streams[row].mix(found[row, place - first])
                        found[row, place - first] = np.log(np.maximum(mixed, np.finfo(np.float32).tiny))
        return torch.from_numpy(found).to(log_p)

    def made_of_weights(self) -> tuple[StreamModel, Distribution | None]:
        """What evaluation needs, made anew after each change of the weights."""
        now = [(own.data_ptr(), own._version) for own in (*self.network.parameters(), *self.buffers())]
        if self.made[0] != now:
            stream = StreamModel(self.network, self.config.segment + self.config.memory)
            self.made = now, (stream, self.mixture and self.mixture.distribution())
        return self.made[1]
