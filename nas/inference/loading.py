"""Load a trained model from a run folder of retrain.py, or from a folder that nas.export wrote."""

from dataclasses import replace
from pathlib import Path

from nas.data.vocabulary import VOCABULARY, Vocabulary
from nas.inference.language_model import LanguageModel
from nas.retraining.weights import read_trained, set_weights
from nas.training.build import build_fixed
from nas.training.device import device_context


def load_model(path: str | Path, device: str = "auto") -> LanguageModel:
    """The model with the best weights of a training.

    Args:
        path: the run folder of a training, or an exported folder.
        device: auto (a GPU if there is one), cpu or cuda.

    Raises InputError if a file is missing, damaged or foreign.
    """
    trained = read_trained(Path(path))
    config = replace(trained.config, train=replace(trained.config.train, device=device, compile="never"))
    vocabulary, context = Vocabulary.load(Path(path) / VOCABULARY), device_context(config.train)
    module = build_fixed(trained.pattern, config, vocabulary.size)
    set_weights(module, trained)
    return LanguageModel(module.to(context.device).eval(), vocabulary, trained.pattern, config, context)
