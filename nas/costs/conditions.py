"""The conditions of measured costs: the device, and sizes."""

from dataclasses import asdict
from importlib.metadata import version

import torch

from nas.core.config import Config
from nas.core.errors import check_onnx
from nas.core.pattern import describe_sizes
from nas.core.run_folder import processor
from nas.costs.flops import batch_shape
from nas.data.corpus import Corpus
from nas.training.build import backbone_options, block_config
from nas.training.device import DeviceContext


def work_conditions(config: Config) -> dict:
    """What is timed, and what runs it."""
    latency = config.search.latency
    return {"timing": latency.timing, "runtime": "ONNX Runtime" if latency.source == "onnx" else "PyTorch"}


def device_conditions(config: Config, context: DeviceContext) -> dict:
    """The work and the device. Raises InputError if the runtime is not installed."""
    own = work_conditions(config) | {"threads": context.threads}
    if config.search.latency.source == "onnx":  # it runs on the CPU
        check_onnx()
        return own | {"processor": processor(), "precision": "fp32", "onnxruntime": version("onnxruntime")}
    device = context.name if context.is_gpu else processor()
    return own | {"processor": device, "precision": context.precision, "torch": str(torch.__version__)}


def size_conditions(config: Config, corpus: Corpus, operations: list[str]) -> dict:
    """The text, the options of the model and the sizes of these operations. config: without auto."""
    batch, segment, memory = batch_shape(config)
    model = asdict(block_config(config)) | backbone_options(config, corpus.vocab_size)
    unused, own = ["depth_scaled"], {}
    if config.search.latency.timing == "training":
        own = {"optimizer": config.train.optimizer}
    else:
        unused += ["recompute", "dropout"]
    own |= {key: value for key, value in model.items() if key not in unused}
    own |= {name: describe_sizes(name, config.shape) for name in operations}
    text = corpus.meta["splits"]["train"]
    own |= {"train_sha256": text.get("sha256"), "train_tokens": text["tokens"]}
    return {"batch_size": batch, "segment": segment, "memory": memory, "vocab_size": corpus.vocab_size, **own}
