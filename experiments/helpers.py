"""What several experiments share."""

from pathlib import Path

from nas.core.config import Config
from nas.core.config_loading import load_config


def open_experiment(path: Path, overrides: list[str]) -> tuple[Config, object, object]:
    """(configuration, corpus, device context) of a configuration file. Sets the seed and the device."""
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.training.device import set_up_device

    config = load_config(path, overrides)
    context = set_up_device(config.seed, config.train)
    return config, Corpus(prepare(config.data)), context


def is_due(step: int, steps: int, times: int) -> bool:
    """Whether an evaluation follows this step, if `times` of them divide a training of `steps` steps equally."""
    return step * times // steps > (step - 1) * times // steps


def kendall_tau(first: list[float], second: list[float]) -> float:
    """Kendall's tau-b, which equals tau-a where no values are equal, as with measured losses."""
    from scipy.stats import kendalltau

    return float(kendalltau(first, second).statistic)


def print_row(*cells, header: bool = False) -> None:
    """Print a row of a Markdown table. A cell of None is empty. header: whether the rows of the table follow."""
    row = "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"
    print(row + ("\n|" + "---|" * len(cells) if header else ""), flush=True)
