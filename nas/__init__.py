"""Neural architecture search for faster Transformer-XL language models."""


def load_model(path, device: str = "auto"):
    """Load the model of a run folder of retrain.py, or of an exported folder. See nas.inference.loading.load_model."""
    from nas.inference.loading import load_model  # imports torch

    return load_model(path, device)
