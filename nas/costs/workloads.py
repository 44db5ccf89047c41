"""What is timed: a segment or a token through a model with full memories."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from models.stream import Decoder, StreamModel, export_graph, open_graph
from models.transformer_xl import TransformerXL
from nas.core.config import Config
from nas.core.errors import check_onnx
from nas.costs.flops import batch_shape
from nas.training.build import build_fixed
from nas.training.device import DeviceContext
from nas.training.optimizer import WeightsOptimizer


class SegmentWork:
    """One segment through a model with full memories: a forward pass, or a training step.

    Each call repeats it, uncompiled, with the same tokens [B, L + 1], and returns when the device has finished.
    """

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config, context: DeviceContext):
        self.context, self.model = context, model.to(context.device).eval()
        tokens, (_, segment, self.memory_length) = tokens.to(context.device), batch_shape(config)
        self.inputs, self.memories, self.optimizer = (tokens[:, :-1], tokens[:, 1:]), None, None
        for _ in range(-(-self.memory_length // segment)):
            _, self.memories = self.forward()
        if config.search.latency.timing == "training":
            self.optimizer = WeightsOptimizer(model, config.train, 1, context.muon_bf16)
            self.optimizer.set_lr(step=1)
            model.train()

    def forward(self):
        with self.context.autocast(), torch.set_grad_enabled(self.optimizer is not None):
            return self.model(*self.inputs, self.memories, self.memory_length)

    def __call__(self) -> None:
        if self.optimizer:
            self.optimizer.zero_grad()
        nll, _ = self.forward()
        if self.optimizer:
            nll.mean().backward()
            self.optimizer.step()
        self.context.synchronize()


class TokenWork:
    """The next token of one stream whose memories are full, as in generation, without sampling."""

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config, context: DeviceContext):
        _, length, memory = batch_shape(config)
        self.decoder, self.context = Decoder(model.to(context.device), length + memory), context
        self.token = tokens[:, :1].to(context.device)
        for _ in range(length + memory):
            self()

    def __call__(self) -> None:
        with self.context.autocast():
            self.decoder.read(self.token)
        self.context.synchronize()


class GraphWork:
    """As TokenWork, in ONNX Runtime. Each call reads the same token after the same memories."""

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config, context: DeviceContext):
        _, length, memory = batch_shape(config)
        network = StreamModel(model.eval(), length + memory)
        with torch.no_grad(), TemporaryDirectory() as folder:
            state = network.start(1)
            if memory:
                _, state = network(tokens[:, :1].expand(-1, memory), state)
            export_graph(network, file := Path(folder) / "model.onnx")
            self.session = open_graph(file, context.threads)
        self.inputs = {"tokens": tokens[:, :1].numpy(), **{name: value.numpy() for name, value in state.items()}}

    def __call__(self) -> None:
        self.session.run(None, self.inputs)


def new_works(
    patterns: list[list[str]], config: Config, counts: np.ndarray, context: DeviceContext
) -> list[SegmentWork | TokenWork | GraphWork]:
    """The work of each pattern, with new weights."""
    batch, segment, _ = batch_shape(config)
    # Tokens have the frequencies of the training text, because the cost of an adaptive output layer depends on them.
    frequencies, generator = torch.from_numpy(counts).double(), torch.Generator().manual_seed(0)
    tokens = frequencies.multinomial(batch * (segment + 1), replacement=True, generator=generator).view(batch, -1)
    latency = config.search.latency
    work = TokenWork if latency.timing == "generation" else SegmentWork
    if latency.source == "onnx":
        check_onnx()
        work = GraphWork
    return [work(build_fixed(pattern, config, len(counts)), tokens, config, context) for pattern in patterns]
