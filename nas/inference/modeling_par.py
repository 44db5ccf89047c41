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
    """Rows of a batch that have the same padding. state: of StreamModel; in training Memories."""

    rows: list[int]
    state: dict[str, Tensor] | Memories | None


@dataclass
class ParState:
    """What was read of each row. length: columns of the batch that were read, with padding. streams: of the mixture."""

    parts: list[Part]
    streams: list[Stream]
    length: int = 0
    is_compileable = is_croppable = False  # generate() asks
    is_linear = ()

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
    """The arrays of a mixture in model.safetensors, as bytes, so that no change of dtype concerns them.

    settings: of ParConfig.
    """

    def __init__(self, settings: dict):
        super().__init__()
        self.settings = settings
        for name, (dtype, shape) in settings["arrays"].items():
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            self.register_buffer(f"array_{name}", torch.empty(size, dtype=torch.uint8))

    def distribution(self) -> Distribution:
        arrays = {}
        for name, (dtype, shape) in self.settings["arrays"].items():
            arrays[name] = getattr(self, f"array_{name}").cpu().numpy().view(dtype).reshape(shape)
        return Distribution(self.settings | arrays, arrays)


class ParForCausalLM(PreTrainedModel, GenerationMixin):
    """In evaluation mode the whole predictor, with its mixture, without gradients; in training the network alone."""

    config_class = ParConfig
    _tied_weights_keys = {"network.head.weight": "network.embedding.weight"}  # noqa: RUF012
    _is_stateful = True  # generate() cannot go back

    def __init__(self, config: ParConfig):
        super().__init__(config)
        block = BlockConfig(**config.block)
        self.network = build_pattern([*map(tuple, config.pattern)], block, config.vocab_size, **config.backbone)
        self.mixture = MixtureArrays(config.mixture) if config.mixture else None
        self.made = None, None  # versions of the weights, and what was made of them
        self.post_init()

    def train(self, mode: bool = True) -> "ParForCausalLM":
        self.made = None, None  # fused optimizers do not count the changes of weights
        return super().train(mode)

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
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: ParState | None = None,
        past_key_values: ParState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool = True,
        **others,
    ) -> CausalLMOutputWithPast:
        """input_ids [B, L]: the next tokens of each row. Ids from V on are padding, and so are zeros of attention_mask
        [B, >= L], at any place; the logits there are those of the token before. In later calls generate() gives a
        padding id to rows that have ended. Logits [B, L, V] are log-probabilities.

        cache, or past_key_values before Transformers 5.24: the state that the call before returned; it changes.
        use_cache=False: none is returned. labels [B, L]: as input_ids, or -100; the loss is that of labels[:, 1:].
        logits_to_keep: the number of last positions that get logits, 0 for all of them, or their indices; labels need
        all. Raises ValueError without input_ids, in float16, for an empty text without a line end, and for an
        attention_mask with padding in later calls.
        """
        if input_ids is None:
            raise ValueError("give input_ids: inputs_embeds are not possible")
        if self.dtype == torch.float16:
            raise ValueError("float16 cannot hold the numbers of this model; give bfloat16 or float32")
        state, vocabulary = cache if cache is not None else past_key_values, self.config.vocab_size
        columns = input_ids.shape[1]
        if not columns:  # an empty prompt
            input_ids, attention_mask = input_ids.new_full((len(input_ids), 1), vocabulary, dtype=torch.int64), None
        seen = input_ids < vocabulary
        if attention_mask is not None:
            seen = seen & (attention_mask[:, -columns:] > 0)
        if state is None:
            input_ids, seen = self.begin_empty_rows(input_ids, seen)
            state = self.begin(seen)
        elif attention_mask is not None and not (attention_mask[:, -columns:] > 0).all():
            raise ValueError("an attention_mask may hold padding in the first call only, without a cache")
        else:
            input_ids, seen = input_ids.masked_fill(~seen, 0), torch.ones_like(seen)
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            hidden = self.read(input_ids, seen, state)
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            if labels is None:
                places = places[-logits_to_keep:] if isinstance(logits_to_keep, int) else places[logits_to_keep]
            kept = hidden[:, places]
            log_p = self.network.head.log_probabilities(kept.flatten(0, 1)).unflatten(0, kept.shape[:2])
        if state.streams:
            log_p = self.mix(input_ids, seen, hidden, log_p, places.tolist(), state)
        state.length += columns
        loss = None
        if labels is not None:
            # The first token of a row has nothing before it that predicts it.
            labels = labels.masked_fill((labels >= vocabulary) | (seen.cumsum(dim=1) <= 1), -100)
            loss = self.loss_function(logits=log_p, labels=labels, vocab_size=vocabulary, **others)
        state = None if self.training or use_cache is False else state
        output = CausalLMOutputWithPast(loss=loss, logits=log_p, **{CARRIED: state})
        return output if return_dict else output.to_tuple()

    def begin_empty_rows(self, input_ids: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that have nothing but padding begin with a line end, as empty prompts do in par-nas."""
        empty = ~seen.any(dim=1)
        if empty.any():
            if self.config.bos_token_id is None:
                raise ValueError("a text has no tokens, and the vocabulary has no line end")
            input_ids, seen = input_ids.clone(), seen.clone()
            input_ids[empty, -1], seen[empty, -1] = self.config.bos_token_id, True
        return input_ids, seen

    def begin(self, seen: Tensor) -> ParState:
        """The state before the first tokens. seen [B, L]: which are no padding."""
        rows, stream, beside = {}, *((None, None) if self.training else self.made_of_weights())
        for row, own in enumerate(seen.tolist()):
            rows.setdefault(tuple(own), []).append(row)
        parts = [Part(own, stream.start(len(own)) if stream else None) for own in rows.values()]
        return ParState(parts, [Stream(beside) for _ in seen] if beside else [])

    def read(self, input_ids: Tensor, seen: Tensor, state: ParState) -> Tensor:
        """The inputs of the output layer [B, L, D]. Segments are those of an evaluation."""
        segment, stream, found = self.config.segment, None if self.training else self.made_of_weights()[0], {}
        for part in state.parts:
            own, pieces = seen[part.rows[0]], []
            tokens = input_ids[part.rows][:, own]
            for piece in tokens.split(segment, dim=1):
                if stream:
                    hidden, part.state = stream.hidden(piece, part.state, min(tokens.shape[1], segment))
                else:
                    hidden, part.state = self.network.read(piece, part.state, self.config.memory)
                pieces.append(hidden)
            last = (own.cumsum(dim=0) - 1).clamp(min=0)  # of the tokens up to each place
            found |= zip(part.rows, torch.cat(pieces, dim=1)[:, last], strict=True)
        return torch.stack([found[row] for row in range(len(input_ids))])

    def mix(
        self, input_ids: Tensor, seen: Tensor, hidden: Tensor, log_p: Tensor, places: list[int], state: ParState
    ) -> Tensor:
        """The log-probabilities of the mixture [B, K, V] at K places."""
        states, network = hidden.float().cpu().numpy(), log_p.float().cpu().numpy()
        found, smallest, wanted = np.empty_like(network), np.finfo(np.float32).tiny, {}
        for index, place in enumerate(places):
            wanted.setdefault(place, []).append(index)
        for row, stream in enumerate(state.streams):
            for place, (token, is_seen) in enumerate(zip(input_ids[row].tolist(), seen[row].tolist(), strict=True)):
                if is_seen:
                    stream.add(token, states[row, place])
                for index in wanted.get(place, []):
                    if stream.read:
                        found[row, index] = np.log(np.maximum(stream.mix(network[row, index]), smallest))
                    else:  # padding before the text
                        found[row, index] = network[row, index]
        return torch.from_numpy(found).to(log_p)

    def made_of_weights(self) -> tuple[StreamModel, Distribution | None]:
        """What evaluation needs, made anew after changes of weights; those by `.data` show after eval() or train()."""
        now = [(own.data_ptr(), own._version) for own in (*self.parameters(), *self.buffers())]
        if self.made[0] != now:
            stream = StreamModel(self.network, self.config.segment + self.config.memory)
            self.made = now, (stream, self.mixture and self.mixture.distribution())
        return self.made[1]
