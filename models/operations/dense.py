"""Operations of each position alone: the feed-forward network and the empty branch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.operations.operation import BareReader, BlockConfig, Operation


def relu_squared(x: Tensor) -> Tensor:
    """max(0, x)^2 (Primer, arXiv 2109.08668)."""
    return torch.relu(x).square()


ACTIVATIONS = {"relu_squared": relu_squared, "relu": torch.relu, "gelu": F.gelu}


class DenseReader(BareReader):
    def branch(self, x, segment):
        expand, output = self.operation.expand, self.operation.output
        hidden = self.operation.activation(F.linear(x, expand.weight, expand.bias))
        return F.linear(hidden, output.weight, output.bias)


class Dense(Operation):
    """Position-wise feed-forward network (arXiv 1706.03762, section 3.3)."""

    Reader = DenseReader

    def __init__(self, config: BlockConfig, d_ffn: int):
        super().__init__(config)
        self.expand = nn.Linear(config.d_model, d_ffn)
        self.activation = ACTIVATIONS[config.activation]
        self.output = nn.Linear(d_ffn, config.d_model)

    def branch(self, context, length, segment):
        return self.output(self.dropout(self.activation(self.expand(context))))


class Identity(Operation):
    """An empty branch. A search can choose it to leave out a block."""

    def __init__(self, config: BlockConfig):
        nn.Module.__init__(self)  # without norm and dropout

    def forward(self, x, state, segment):
        return x.new_zeros(()).expand_as(x), state
