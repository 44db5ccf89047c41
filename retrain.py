"""Stage 3: train a fixed layer pattern as an ordinary Transformer-XL, and evaluate it."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from nas.core.config import EVAL_ONLY, Config, flat_config
from nas.core.config_loading import add_arguments, load_config, simplify
from nas.core.errors import InputError, RunError, run_command
from nas.core.files import read_yaml
from nas.core.outcome import predictor_ms
from nas.core.pattern import SHAPE_OPTIONS, abbreviate, read_pattern, resolve_block, shape_of, shape_options
from nas.core.run_folder import CONFIG, MIXTURE, PROVENANCE, RESULTS, trial_file
from nas.costs.cost_table import latency_report

SIMILAR = 1.15  # vocabularies shorten training and test text differently


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", metavar="PATTERN.yaml")
    add_arguments(parser)
    eval_only = "train nothing; evaluate the run's best.pt; evaluate.segment and evaluate.memory may differ"
    beside = "at the end print the results of this finished run beside those of the present one; may be repeated"
    until = "stop after this step and write trial-STEP.yaml with the metrics on valid; --resume goes on later"
    parser.add_argument("--until", type=int, metavar="STEP", help=until)
    parser.add_argument("--eval-only", action="store_true", help=eval_only)
    parser.add_argument("--beside", action="append", type=Path, default=[], metavar="RUN_DIR", help=beside)
    arguments = parser.parse_intermixed_args()
    if arguments.until is not None and (arguments.until < 1 or arguments.eval_only):
        raise InputError(f"--until {arguments.until} must be a step from 1, without --eval-only")
    return arguments


def notice_other_sizes(pattern_file: dict, config: Config) -> None:
    """Print a notice for each operation whose sizes differ from those in the search, and if model.blocks differs."""
    for name, searched in (pattern_file.get("sizes") or {}).items():
        _, sizes = resolve_block(name, config.shape)
        for key, value in searched.items() if name in pattern_file["blocks"] else ():
            if sizes.get(key) != value:
                print(f"NOTICE: {name} was searched with {key}={value}; it is trained with {sizes.get(key)}")
    blocks = len(pattern_file["blocks"])
    tried = "trials" in (pattern_file.get("derived_from") or {})
    if "sizes" in pattern_file and blocks != config.model.blocks and not tried:
        print(f"NOTICE: the pattern has {blocks} blocks; model.blocks={config.model.blocks} is not used")


def print_beside(runs: list[Path]) -> None:
    """Print a line for each finished run: pattern, quality on test, and latency."""
    width = 2 + max(12, *(len(abbreviate(read_yaml(run / RESULTS)["pattern"])) for run in runs))
    costs = f"{'ms for 1,000 bytes':>20}{'of interleaved':>16}"
    print(f"\n{'on test:':<{width}}{'word perplexity':>16}{'bits per byte':>15}{costs}  run")
    lengths, digests, origins, test_tokens = [], set(), set(), set()
    for run in runs:
        results = read_yaml(run / RESULTS)
        test = results["test"]
        words = f"{test['word_perplexity']:.2f}" if test["word_perplexity_comparable"] else "-"
        letters, latency = abbreviate(results["pattern"]), results["latency"]
        ratio = f"{latency['ratio_to_interleaved']:.2f}" if latency else "-"
        costs = f"{predictor_ms(results):>20.3f}{ratio:>16}"
        print(f"{letters:<{width}}{words:>16}{test['bits_per_byte']:>15.4f}{costs}  {run}")
        if results["network"]:
            lengths.append(results["train_tokens"] * test["bytes"] / test["tokens"] / 1e6)
        test_tokens.add(test["tokens"])
        digests.add(str(read_yaml(run / PROVENANCE)["data_sha256"]))
        origins.add(read_yaml(run / CONFIG)["train"].get("init_from"))
    if len(digests) > 1:
        print("WARNING: these runs read different texts, so their perplexities are not comparable")
    elif lengths and max(lengths) > min(lengths) * (SIMILAR if len(test_tokens) > 1 else 1):
        print(f"WARNING: these runs trained on different lengths of text: {min(lengths):.3g} to {max(lengths):.3g} MB")
    if len(origins) > 1:
        print("WARNING: these runs started from different weights (train.init_from), so they are not trained alike")


def print_results(results: dict) -> None:
    """Print the main metrics of results.yaml."""
    from nas.training.evaluation import NO_TEXT, NO_WORDS

    network, mixture = results["network"], results["mixture"]
    if network:
        print(f"pattern {abbreviate(results['pattern'])}, {results['parameters']:,} parameters")
        flops, ratio = results["flops_per_token"], results["flops_ratio_to_interleaved"]
        print(f"cost: {flops:,.0f} FLOPs per token, {ratio:.2f} of the interleaved pattern's")
    for words in latency_report(results["latency"]):
        print(words)
    parts = ", ".join(mixture["parts"]) if mixture else ""
    for name, own in (("network alone", network), (f"mixture of {parts}", mixture and results)):
        print(f"{name}:" if own else "", end="\n" if own else "")
        for split in ("valid", "test") if own else ():
            about = own[split]
            words = f"{about['word_perplexity']:.2f} per word, " if about["word_perplexity_comparable"] else ""
            lost = "" if words else f" ({NO_WORDS})"
            bits = f"{about['bits_per_byte']:.4f} bits per byte"
            lost += "" if about["bits_per_byte_comparable"] else f" ({NO_TEXT})"
            print(f"  {split}: perplexity {about['perplexity']:.2f} per token, {words}{bits}{lost}")


def main() -> None:
    arguments = parse_arguments()
    pattern_file = read_pattern(arguments.pattern)
    config = load_config(arguments.config, [*shape_options(pattern_file), *arguments.overrides])
    for key, value in shape_of(flat_config(config)).items():
        if pattern_file.get(key) not in (None, value):
            print(f"NOTICE: the pattern has {key}={pattern_file[key]}; it is trained with {SHAPE_OPTIONS[key]}={value}")
    pattern_file["blocks"] = simplify(pattern_file["blocks"], config, f"{arguments.pattern}: block")
    notice_other_sizes(pattern_file, config)

    # Import torch only now, so that --help and configuration errors do not wait for it.
    from nas.core.run_folder import RunFolder, check_folder
    from nas.retraining.phase import BEST
    from nas.retraining.weights import with_origin
    from nas.training.device import set_up_device
    from nas.training.distributed import process_group

    marks = (EVAL_ONLY,) if arguments.eval_only else ()
    folder = Path(arguments.run)
    if arguments.eval_only and not pattern_file["blocks"]:
        raise InputError("--eval-only: a pattern without blocks has no weights; count anew, into another --run folder")
    if arguments.eval_only and not (folder / BEST).exists():
        raise InputError(f"--eval-only: {folder} holds no {BEST}; train it first, without --eval-only")
    check_folder(folder, arguments.resume or arguments.eval_only, "retrain")
    for other in arguments.beside:
        if not (other / RESULTS).exists():
            raise InputError(f"--beside {other} holds no {RESULTS}; give the --run folder of a finished retraining")
    config, origin = with_origin(config, pattern_file["blocks"], folder)
    run = RunFolder(folder, config, "retrain", {"pattern": pattern_file["blocks"]}, marks)
    runtime = set_up_device(config.seed, config.train)
    with process_group(runtime.device):
        retrain(pattern_file, config, origin, run, runtime, arguments)
        if arguments.beside and not arguments.until:
            print_beside([*arguments.beside, run.path])


def retrain(pattern_file: dict, config: Config, origin, run, runtime, arguments: argparse.Namespace) -> None:
    """Run the stage, on each rank. origin: the weights of train.init_from, or None."""
    from nas.core.run_folder import check_text, provenance
    from nas.data.corpus import Corpus, prepare
    from nas.data.vocabulary import VOCABULARY
    from nas.retraining.phase import RetrainPhase, evaluate_best, evaluate_without_network
    from nas.retraining.weights import continue_trial, set_weights
    from nas.training.build import build_fixed
    from nas.training.distributed import first_on_each_node
    from nas.training.passes import auto_lines, passes_warning, resolve_auto, warmup_warning

    data = config.data
    if config.train.init_from and not origin:  # the run goes on, and the folder of the origin may be gone
        data = replace(data, tokenizer=str(run.path / VOCABULARY))
    corpus = Corpus(first_on_each_node(lambda: prepare(data, print)))
    print(f"{len(corpus.tokens('train')):,} training tokens, a vocabulary of {corpus.vocab_size:,}")
    print(f"pattern {abbreviate(pattern_file['blocks'])}, d_model {config.model.d_model}")
    given, config = config, resolve_auto(config, corpus)
    for line in auto_lines(given, config, corpus):
        print(line)
    record = provenance(config, corpus.meta, runtime)
    if not pattern_file["blocks"]:
        run.start(config, record)
        run.save(VOCABULARY, corpus.vocabulary)
        results, mixture = evaluate_without_network(config, corpus)
        finish(run, RESULTS, results, mixture)
        return
    model = build_fixed(pattern_file["blocks"], config, corpus.vocab_size)
    if origin:
        set_weights(model, origin)
        print(f"starting from the weights of {origin.file}, with their vocabulary")
    phase = RetrainPhase(model, corpus, config, runtime, arguments.until)

    if arguments.eval_only:
        run.check_config(config)
        check_text(run.path, record)
        results, _ = evaluate_best(phase, run, pattern_file)
        mixture, out = None, f"results-segment{results['segment']}-memory{results['memory']}.yaml"
    else:
        run.start(config, record)
        run.save(VOCABULARY, corpus.vocabulary)
        continue_trial(pattern_file, config, run, record, phase.total_steps)
        passes = passes_warning(config, corpus)
        for warning in filter(None, (passes, warmup_warning(config, phase.total_steps))):
            print(warning)
        out, found = RESULTS, train(phase, run, pattern_file, arguments.until)
        if found is None:
            return
        results, mixture = found
    finish(run, out, results, mixture)


def finish(run, out: str, results: dict, mixture) -> None:
    """Write the mixture, if there is a new one, and then the results, and print them."""
    if mixture:
        run.save(MIXTURE, mixture)
    run.write(out, results)
    print_results(results)
    print(f"written to {run.path / out}")


def train(phase, run, pattern_file: dict, until: int | None) -> tuple | None:
    """Train to the end. Returns the content of results.yaml and the new mixture, or None if the training stops earlier,
    at step `until`.
    """
    from nas.retraining.phase import BEST, evaluate_best
    from nas.training.distributed import barrier, broadcast_from_main
    from nas.training.trainer import Trainer

    trainer = Trainer(phase, run)
    trainer.fit(until)
    if until and trainer.step > until:
        raise InputError(f"--until {until}: {run.path} is at step {trainer.step} already")
    if trainer.step < phase.total_steps:
        write_trial(phase, run, trainer, phase.trial_metrics())
        print(f"stopped at step {trainer.step} of {phase.total_steps}; --resume goes on")
        return None
    lost, finished = broadcast_from_main(lambda: [not (run.path / BEST).exists(), (run.path / RESULTS).exists()])
    if lost:
        print(f"NOTICE: {run.path / BEST} is missing; the weights of the last step replace it")
        phase.best_nll = math.inf
        phase.evaluate(run, trainer.step)
        barrier()
    if finished and not lost:  # by an earlier call
        results, mixture = read_yaml(run.path / RESULTS), None
    else:
        results, mixture = evaluate_best(phase, run, pattern_file)
        results |= {"train_steps": trainer.step, "train_tokens": trainer.tokens, "wall_time_s": trainer.wall_seconds}
        results["train_tokens_per_s"] = trainer.tokens / trainer.train_seconds
    if until:
        write_trial(phase, run, trainer, {"valid": results["valid"], "network": {"valid": results["network"]["valid"]}})
    test = results["network"]["test"]  # written again, because restoring the checkpoint removed its line
    run.metrics(trainer.step, trainer.tokens, "test", test["nll_per_token"], evaluated_tokens=test["tokens"])
    return results, mixture


def write_trial(phase, run, trainer, metrics: dict) -> None:
    """Write what a trial has reached. metrics: of trial_metrics(). Raises RunError if the loss is not finite."""
    loss = metrics["network"]["valid"]["nll_per_token"]
    if not math.isfinite(loss):
        raise RunError(f"the loss on valid is {loss} at step {phase.until}; give a smaller train.lr")
    metrics = {"step": trainer.step, "of_steps": phase.total_steps, **metrics}
    # The mean has fewer steps if an earlier call stopped among them.
    metrics |= {"averaged_steps": phase.trial_average.count, "wall_time_s": trainer.wall_seconds}
    run.write(trial_file(phase.until), metrics)


if __name__ == "__main__":
    run_command(main)
