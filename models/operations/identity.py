"""The empty branch."""

from torch import nn

from models.operations.operation import BlockConfig, Operation, TokenReader


class IdentityReader(TokenReader):
    def __call__(self, x, segment):
        return x


class Identity(Operation):
    """An empty branch. A search can choose it to leave out a block."""

    Reader = IdentityReader

    def __init__(self, config: BlockConfig):
        nn.Module.__init__(self)  # without norm and dropout

    def forward(self, x, state, segment):
        return x.new_zeros(()), state  # broadcasts over [B, L, D]
