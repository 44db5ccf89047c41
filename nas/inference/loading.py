"""Load a trained model from a run folder of retrain.py, or from a folder that nas.export wrote."""

from dataclasses import replace
from pathlib import Path

import safetensors
from safetensors.torch import load_file
from torch import Tensor, nn

from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.pattern import check_blocks
from nas.data.vocabulary import VOCABULARY, Vocabulary
from nas.inference.language_model import LanguageModel
from nas.retraining.phase import BEST
from nas.training.build import build_fixed
from nas.training.checkpoint import load_checkpoint
from nas.training.device import device_context

WEIGHTS, CONFIG = "model.safetensors", "config.json"  # of an exported folder
EXPORT_FORMAT = "par-model/1"


def load_model(path: str | Path, device: str = "auto") -> LanguageModel:
    """The model with the best weights of a training.

    Args:
        path: the run folder of a training, or an exported folder.
        device: auto (a GPU if there is one), cpu or cuda.

    Raises InputError if a file is missing, damaged or foreign.
    """
    folder = Path(path)
    exported = (folder / WEIGHTS).exists()
    if not exported and not (folder / BEST).exists():
        raise InputError(
            f"{folder} holds neither {BEST} nor {WEIGHTS}; give the run folder of a training, or an exported folder"
        )
    file = folder / (CONFIG if exported else "config.yaml")
    config, content = load_config(file, []), read_yaml(file)
    if exported and content.get("format") != EXPORT_FORMAT:
        raise InputError(f"{file} has format {content.get('format')!r}; this version reads {EXPORT_FORMAT!r}")
    pattern = check_blocks(content.get("pattern"), file)
    config = replace(config, train=replace(config.train, device=device, compile="never"))
    vocabulary, context = Vocabulary.load(folder / VOCABULARY), device_context(config.train)
    module = build_fixed(pattern, config, vocabulary.size)
    if exported:
        set_weights(module, read_weights(folder / WEIGHTS), folder / WEIGHTS)
    else:
        set_weights(module, load_checkpoint(folder / BEST, "model")["model"], folder / BEST)
    return LanguageModel(module.to(context.device).eval(), vocabulary, pattern, config, context)


def read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


def set_weights(module: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Copy weights into a model. Raises InputError if their names or shapes are not those of the model.

    weights: may leave out the second name of a tensor that two layers share.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, shape in shapes.items():
        found = tuple(weights[name].shape) if name in weights else "nothing"
        if found != shape:
            raise InputError(f"{path} does not fit its configuration: {name} needs the shape {shape}, not {found}")
    if unknown := weights.keys() - module.state_dict().keys():
        raise InputError(f"{path} does not fit its configuration: the model has no {min(unknown)}")
    module.load_state_dict({name: weights[name] for name in shapes}, strict=False)
