"""The configuration of an exported model in Transformers."""

from transformers import PretrainedConfig


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
