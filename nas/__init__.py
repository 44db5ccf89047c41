"""Neural architecture search for faster Transformer-XL language models."""


def load_model(path, device: str = "auto"):
    """Load the model of a run folder of retrain.py or of an exported folder. See nas.inference.language_model."""
    from nas.inference.language_model import load_model  # imports torch

    return load_model(path, device)
