"""nas.search.objective."""

import torch
from torch import Tensor

from nas.core.config import Config
from nas.core.errors import InputError
from nas.costs.table import CostTable


def entropy_of(pi: Tensor) -> Tensor:
    """Entropy of each block's pi [N, O] in nats [N]."""
    return -(pi * pi.clamp_min(torch.finfo(pi.dtype).tiny).log()).sum(dim=-1)


def check_target(config: Config, price: CostTable) -> None:
    """Raises InputError where the expected cost can never come down to search.latency.target."""
    options = config.search.latency
    least = price.least_ratio(config.search.operations, config.model.blocks)
    if options.source != "none" and options.mode == "target" and options.target < least:
        raise InputError(
            f"search.latency.target={options.target:g} is out of reach: the cheapest pattern costs {least:.3f} of the "
            "interleaved pattern's; give at least that"
        )
