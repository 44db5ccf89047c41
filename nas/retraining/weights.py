"""The weights of trained models: of a run folder of retrain.py, of an exported folder, or of a trial that goes on."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nas.core.config import NETWORK, TRIAL, Config, changes, flat_config, known_values, marked
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import read_yaml, user_path
from nas.core.pattern import abbreviate, describe_sizes, read_blocks
from nas.core.run_folder import CHECKPOINT, CONFIG, DIGESTS, METRICS, MIXTURE, OUTCOME, PROVENANCE, SUMMARY, RunFolder
from nas.data.sources import sha256_of
from nas.data.vocabulary import VOCABULARY
from nas.retraining.phase import BEST
from nas.training.distributed import is_main
from nas.training.trainer import load_checkpoint

WEIGHTS, EXPORT_CONFIG, GRAPH = "model.safetensors", "config.json", "model.onnx"  # of exported folders
CODE = "modeling_par.py"  # of those for Transformers
EXPORT_FORMAT = "par-model/4"
SCALE = ".scale"  # after the name of a matrix of int8


@dataclass(frozen=True)
class Trained:
    """A trained model: its configuration, its pattern, its weights by the names of TransformerXL, and their file."""

    config: Config
    pattern: list[str]
    weights: dict[str, Tensor]
    file: Path


def read_trained(folder: Path) -> Trained:
    """The best weights in a run folder or an exported folder. Raises InputError if a file is missing or damaged."""
    exported = (folder / WEIGHTS).exists()
    alone = not exported and (folder / MIXTURE).exists() and read_yaml(folder / CONFIG).get("pattern") == []
    if not exported and not alone and not (folder / BEST).exists():
        raise InputError(f"{folder} {missing_training(folder)}, or a folder of nas.export --format par")
    file = folder / (EXPORT_CONFIG if exported else CONFIG)
    content = read_yaml(file)
    if for_transformers := exported and content.get("model_type") == "par":
        content = content["training"]
        if not (folder / VOCABULARY).exists():  # save_pretrained() of Transformers does not know it
            raise InputError(f"{folder} lacks its vocabulary; copy {VOCABULARY}/ of the exported folder into it")
    if exported and content.get("format") != EXPORT_FORMAT:  # files of other programs have these names too
        raise InputError(f"{file} has format {content.get('format')!r}; this version reads {EXPORT_FORMAT!r}")
    config, pattern = load_config(file, []), read_blocks(content.get("pattern"), file)
    if not pattern:
        return Trained(config, pattern, {}, file)
    if not exported:
        return Trained(config, pattern, load_checkpoint(folder / BEST, "model")["model"], folder / BEST)
    if for_transformers:  # they may have been trained further
        weights = load_file(folder / WEIGHTS)
        own = {name.partition(".")[2]: one for name, one in weights.items() if name.startswith("network.")}
        return Trained(config, pattern, own, folder / WEIGHTS)
    if content.get("weights_sha256") != sha256_of(folder / WEIGHTS):
        raise InputError(f"{folder / WEIGHTS} is damaged: its SHA-256 is not that of {EXPORT_CONFIG}")
    return Trained(config, pattern, dequantize(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def quantize(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as int8: each row of a matrix, its first dimension, has a scale. Vectors stay as they are."""
    found = {}
    for name, own in weights.items():
        if own.dim() < 2:
            found[name] = own
            continue
        scale = own.abs().amax(dim=tuple(range(1, own.dim())), keepdim=True).clamp(min=1e-12) / 127
        found |= {name: (own / scale).round().to(torch.int8), f"{name}{SCALE}": scale}
    return found


def dequantize(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of quantize(), but for what was rounded. Weights that are no int8 stay as they are."""
    scales = {name.removesuffix(SCALE): own for name, own in weights.items() if name.endswith(SCALE)}
    own = {name: one for name, one in weights.items() if not name.endswith(SCALE)}
    return own | {name: own[name] * scale for name, scale in scales.items() if name in own}


def missing_training(folder: Path) -> str:
    """What a folder without a training is, and what to give instead."""
    if (folder / SUMMARY).exists():
        return f"is a run of all stages: give {folder / read_yaml(folder / SUMMARY)['use']}"
    if (folder / OUTCOME).exists():
        return "is a search; derive its pattern, train it with retrain.py, and give that run folder"
    if (folder / GRAPH).exists():
        return "is an ONNX folder, which only ONNX Runtime and lm_eval read; give the run folder of the training"
    about = "holds no finished training" if folder.exists() else "does not exist"
    return f"{about}; give the run folder of a training"


def with_origin(config: Config, pattern: list[str], run: Path) -> tuple[Config, Trained | None]:
    """The configuration of a training that starts from train.init_from, and these weights; None if it needs none.

    The vocabulary, and options of the model that are auto, become those of the origin. run: the run folder; once it
    holds a checkpoint, the origin is not read. Raises InputError if the origin has another pattern or another model.
    """
    if config.train.init_from is None:
        return config, None
    if (run / CHECKPOINT).exists():
        begun = load_config(run / CONFIG, [])
        return with_vocabulary(config, begun, begun.data.tokenizer), None
    folder = user_path(config.train.init_from)
    origin = read_trained(folder)
    prefix = f"train.init_from={folder}"
    if origin.pattern != pattern:
        raise InputError(f"{prefix} has the pattern {abbreviate(origin.pattern)}, not {abbreviate(pattern)}")
    config = with_vocabulary(config, origin.config, str(folder / VOCABULARY))
    old, new = flat_config(origin.config), flat_config(config)
    for key in marked(NETWORK):
        if old[key] != new[key]:
            raise InputError(f"{prefix} has {key}={old[key]}, not {new[key]}; give the options of that model")
    for block in dict.fromkeys(pattern):
        own, given = (describe_sizes(block, one.shape) for one in (origin.config, config))
        if own != given:
            raise InputError(f"{prefix} has {block} with {own}, not {given}; give the sizes of that model")
    return config, origin


def with_vocabulary(config: Config, origin: Config, tokenizer: str) -> Config:
    """The configuration with another tokenizer, and with the origin's values of the model in place of auto."""
    own = flat_config(origin)
    config = known_values(config, {key: own[key] for key in marked(NETWORK)})
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def set_weights(module: nn.Module, origin: Trained) -> None:
    """Copy weights into a model; tied ones need one name only. Raises InputError if names or shapes are others."""
    weights, prefix = origin.weights, f"{origin.file} does not fit its configuration"
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, shape in shapes.items():
        found = tuple(weights[name].shape) if isinstance(weights.get(name), Tensor) else "nothing"
        if found != shape:
            raise InputError(f"{prefix}: {name} needs the shape {shape}, not {found}")
    if unknown := weights.keys() - module.state_dict().keys():
        raise InputError(f"{prefix}: the model has no {min(unknown)}")
    module.load_state_dict({name: weights[name] for name in shapes}, strict=False)


def continue_trial(pattern_file: dict, config: Config, run: RunFolder, record: dict, total_steps: int) -> None:
    """Copy the trial of a derived pattern into a new run, which then goes on where the trial ended.

    record: provenance of the run. Prints why not, if pattern, text, options or steps differ from the trial's.
    """
    given = (pattern_file.get("derived_from") or {}).get("trial")
    if not given or run.checkpoint.exists() or not is_main():
        return
    trial, anew = Path(given), f"NOTICE: the training starts anew, and does not continue the trial {given}:"
    if not (trial / CHECKPOINT).exists():
        missing = "this folder is not here; paths are relative to the directory of the command"
        print(f"{anew} {f'its {CHECKPOINT} is missing' if trial.exists() else missing}")
        return
    recorded, origin = read_yaml(trial / CONFIG), read_yaml(trial / PROVENANCE)
    old, new = flat_config(recorded), flat_config(config)
    different = changes(old, new, run.may_differ | {*marked(TRIAL)})
    if recorded["pattern"] != pattern_file["blocks"]:
        different.append(f"blocks ({abbreviate(recorded['pattern'])} -> {abbreviate(pattern_file['blocks'])})")
    if old["train.steps"] != total_steps:
        different.append(f"steps ({old['train.steps']} -> {total_steps})")
    if any(origin.get(key) != record.get(key) for key in DIGESTS):
        different.append("the text or its tokenizer")
    if different:
        print(f"{anew} different are {', '.join(different)}")
        return
    for name in (METRICS, BEST, CHECKPOINT):  # the checkpoint last, because it makes the run go on
        if (trial / name).exists():
            Path(shutil.copy(trial / name, run.path / f"{name}.part")).replace(run.path / name)
    print(f"going on from the trial {given}")
