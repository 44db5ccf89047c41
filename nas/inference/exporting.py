"""Write a folder with all that another person needs to use a trained model. Only the formats par hold no code."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import jinja2
from safetensors.torch import save

from nas.core.config import flat_config
from nas.core.errors import InputError, check_onnx, check_package
from nas.core.files import atomic_write, read_yaml, write_text, write_yaml
from nas.core.pattern import FORMAT, abbreviate, resolve_block, shape_of
from nas.core.run_folder import MIXTURE, PATTERN, PROVENANCE, RESULTS, check_text, data_digests
from nas.data.corpus import Corpus, prepare
from nas.data.sources import sha256_of
from nas.data.vocabulary import VOCABULARY
from nas.inference.language_model import LanguageModel, load_model
from nas.inference.onnx_graph import evaluate_graphs, graph_reader, quantize_graph, stream_model, write_graph
from nas.inference.transformers_folder import fast_tokenizer, write_transformers
from nas.mixture import distribution
from nas.reporting.figures import pattern_strip
from nas.retraining.weights import EXPORT_CONFIG, EXPORT_FORMAT, WEIGHTS, missing_training, quantize
from nas.training.evaluation import evaluation_lengths, text_metrics

CARD, PICTURE = "README.md", "pattern.png"
UNFINISHED = ".unfinished"  # folder that a call which was stopped may leave
OTHERS = {UNFINISHED, "lost+found"}  # names in a folder that counts as empty; a new disk has the second one
TRANSFORMERS = "5.20 to 5.24"  # versions that ran
DISTRIBUTION = Path(distribution.__file__)
TEMPLATE = Path(__file__).with_name("model_card.md")


def export(run: Path, out: Path, form: str = "par") -> list[str]:
    """Export a finished training. Returns lines about graph and quality.

    form: one of nas.export.FORMATS; those that end in int8 need the text of the training.
    Raises InputError if the run has not finished, if the folder is not empty, if the text has changed, or as
    write_graph() and prepare().
    """
    if not (run / RESULTS).exists():
        raise InputError(f"{run} {missing_training(run)}")
    if out.exists() and (not out.is_dir() or {entry.name for entry in out.iterdir()} - OTHERS):
        raise InputError(f"--out {out} is not an empty folder; give another one")
    is_graph, is_int8, for_transformers = form.startswith("onnx"), form.endswith("int8"), form == "transformers"
    if is_graph:
        check_onnx()
    if for_transformers:
        check_package("transformers", "--format transformers", "transformers")
    model, lines = load_model(run, "cpu"), []
    if is_graph or for_transformers:
        stream_model(model)  # it refuses a model before a file is written
    tokenizer = fast_tokenizer(model.tokenizer) if for_transformers else None
    if is_int8:
        corpus = Corpus(prepare(model.config.data))
        check_text(run, data_digests(corpus.meta))
    final, out = out, out / UNFINISHED
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model.tokenizer.save(out / VOCABULARY)
    if model.mixture and not for_transformers:
        model.mixture.save(out / MIXTURE)
    if model.mixture and is_graph:
        shutil.copy(DISTRIBUTION, out)
    if for_transformers:
        write_transformers(model, tokenizer, out, exported_config(model, ""))
    elif not is_graph:
        parameters = model.module.named_parameters() if model.module else ()
        weights = {name: parameter.detach().contiguous() for name, parameter in parameters}
        with atomic_write(out / WEIGHTS) as file:
            file.write(save(quantize(weights) if is_int8 else weights))
        write_text(out / EXPORT_CONFIG, json.dumps(exported_config(model, sha256_of(out / WEIGHTS)), indent=2) + "\n")
    else:
        difference = write_graph(model, out, fixed=is_int8)
        lines = [f"ONNX Runtime differs from PyTorch by at most {difference:.1g} nats for 1,000 random tokens"]
    compared = compare_int8(model, out, corpus, is_graph) if is_int8 else []
    own, shape = shape_of(flat_config(model.config)), model.config.shape
    sizes = {name: resolve_block(name, shape)[1] for name in dict.fromkeys(model.pattern)}  # defaults may be others
    write_yaml(out / PATTERN, {"format": FORMAT, **own, "blocks": model.pattern, "sizes": sizes})
    if model.pattern:
        pattern_strip(model.pattern, out / PICTURE)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    records = read_yaml(run / RESULTS), read_yaml(run / PROVENANCE)
    write_text(out / CARD, model_card(model, *records, form, compared, size))
    for entry in sorted(out.iterdir(), key=lambda entry: entry.name == CARD):  # the card comes last
        entry.rename(final / entry.name)
    out.rmdir()
    return lines + compared


def compare_int8(model: LanguageModel, out: Path, corpus: Corpus, is_graph: bool) -> list[str]:
    """A line of quality for float32 and for int8. A graph in `out` is rounded; a folder of the format par is so."""
    print("evaluating float32 and int8 on valid, to which the mixture is fitted", flush=True)
    if not is_graph:
        models = {"float32": model, "int8": load_model(out, "cpu")}
        return [f"{name}: {bits_on_valid(own, corpus):.4f} bits per byte on valid" for name, own in models.items()]
    readers, lines = {"float32": graph_reader(out)}, []
    quantize_graph(out)
    for name, found in evaluate_graphs(readers | {"int8": graph_reader(out)}, corpus).items():
        metric = "word_perplexity" if found["word_perplexity_comparable"] else "perplexity"
        quality = f"{metric.replace('_', ' ')} {found[metric]:.4g} on valid"
        lines.append(f"{name}: {quality}, {found['ms_per_token']:.3f} ms for a token")
    return lines


def bits_on_valid(model: LanguageModel, corpus: Corpus) -> float:
    """The bits per byte of valid, to which the gate of a mixture is fitted."""
    tokens, read = corpus.tokens("valid"), model.read_network(corpus.tokens("valid")) or (None, None)
    nll = model.mixture.mix(model.mixture.look(tokens, *read))[0] if model.mixture else read[0]
    return text_metrics(float(nll.sum()), len(nll), corpus.meta["splits"]["valid"])["bits_per_byte"]


def exported_config(model: LanguageModel, digest: str) -> dict:
    """The content of config.json, without paths of the machine that trained the model. digest: that of the weights."""
    config, vocabulary = asdict(model.config), model.tokenizer
    own = {"tokenizer": vocabulary.kind, "newline": vocabulary.newline, "lowercase": vocabulary.lowercase}
    data = {"source": without_folder(config["data"]["source"]), "vocab_size": config["data"]["vocab_size"], **own}
    train = config["train"] | {"device": "auto", "init_from": without_folder(config["train"]["init_from"])}
    sections = {"data": data, "model": config["model"], "train": train, "evaluate": config["evaluate"]}
    return {"format": EXPORT_FORMAT, "pattern": model.pattern, "weights_sha256": digest, **sections}


def without_folder(path: str | None) -> str | None:
    """The last part of a path, because the folders belong to one machine."""
    return path and Path(path).name


def model_card(
    model: LanguageModel, results: dict, provenance: dict, form: str, compared: list[str], size: int = 0
) -> str:
    """The text of README.md. form: as in export(). compared: lines about float32 and int8. size: of all other files."""
    text, config = TEMPLATE.read_text("utf-8"), model.config
    content = {"form": form, "compared": compared, "config": config, "results": results, "provenance": provenance}
    content |= {"size": size, "versions": TRANSFORMERS}
    content |= {"letters": abbreviate(model.pattern), "blocks": model.pattern, "tokenizer": model.tokenizer}
    folders = {"origin": without_folder(config.train.init_from), "source": without_folder(config.data.source)}
    template = jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return template.render(content | folders, context=sum(evaluation_lengths(config)))
