import subprocess
import sys
from pathlib import Path

import pytest

from nas.core.blocks import resolve_block
from nas.core.config import Config, options
from nas.core.config_loading import load_config, options_help
from nas.core.errors import InputError
from nas.training.passes import short_share

ROOT = Path(__file__).parents[1]


@pytest.fixture
def load(tmp_path):
    def load(*overrides, text="train: {steps: 5}\n"):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return load_config(path, list(overrides))

    return load


def test_overrides_win_over_the_file_and_the_file_over_defaults(load):
    config = load(
        "train.lr=1e-4", "search.method=gumbel", "search.optimizer.lr=0.5", text="train: {lr: 1, steps: 7}\nseed: 3\n"
    )
    assert (config.train.lr, config.train.steps, config.seed) == (1e-4, 7, 3)
    assert config.search.optimizer.lr == 0.5
    assert config.model.d_model == Config().model.d_model


def test_the_later_of_steps_and_epochs_wins(load):
    assert load("train.epochs=2").train.steps is None
    config = load("train.steps=9", text="train: {epochs: 3}\n")
    assert (config.train.steps, config.train.epochs) == (9, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("trian.steps=3", "unknown key 'trian'; the nearest is 'train.steps'"),
        ("train.learning_rate=3", "unknown key 'train.learning_rate'; the nearest is 'train.lr'"),
        ("model.num_heads=3", "unknown key 'model.num_heads'; the nearest is 'model.heads'"),
        ("lr=3", "unknown key 'lr'; the nearest is 'train.lr'"),
        ("train=4", "train=4: sections hold keys with values, such as `train: {steps: 100}`"),
        ("train.steps", "'train.steps' is not of the form section.key=value"),
        ("train.steps=many", "train.steps must be a whole number or null"),
        ("train.steps=true", "train.steps=true: train.steps must be a whole number"),
        ("train.steps=0", "train.steps=0 must be at least 1"),
        ("train.steps=null", "train.steps and train.epochs are both null"),
        ("train.lr=fast", "train.lr must be a number or null"),
        ("train.lr=nan", "train.lr=nan must be a finite number"),
        ("train.lr=0", "train.lr=0.0 must be greater than 0"),
        ("train.init_from=[1]", "train.init_from must be text or null"),
        ("model.dropout=1", "model.dropout=1 must be less than 1"),
        ("model.dropout=-0.1", "model.dropout=-0.1 must be at least 0"),
        ("model.dropout=true", "model.dropout=True must be a number or auto"),
        ("model.dropout=null", "model.dropout=None must be a number or auto"),
        ("train.weight_decay=null", "train.weight_decay=None must be a number or auto"),
        ("train.weight_decay=Auto", "train.weight_decay=Auto must be a number or auto"),
        ("data.lowercase=maybe", "data.lowercase must be true or false"),
        ("data.lowercase=3", "data.lowercase must be true or false"),
        ("data.source=null", "data.source must be text"),
        ("data.source=${seed}", "interpolation"),
        ("seed=99999999999999999999", "seed=99999999999999999999 must be at most"),
        ("data.source={a:1}", "data.source must be text"),
        ("data.source=[", r"'data.source=\['"),
        ("train.device=gpu", "train.device=gpu must be one of .*; the nearest is cuda"),
        ("model.norm=Pre", "model.norm=Pre must be one of pre, post; the nearest is pre"),
        ("model.heads=3", "model.heads=3 must divide model.d_model=128: one of 1, 2, 4,"),
        ("model.cutoffs=[5,2]", r"model.cutoffs=\[5, 2\] must be positive and increasing"),
        ("model.cutoffs=7", "model.cutoffs=7 must be a list of whole numbers"),
        ("model.cutoffs=[5,7.5]", r"model.cutoffs=\[5, 7.5\] must be a list of whole numbers, .* or auto"),
        ("train.segment=0", "train.segment=0 must be at least 1"),
        ("model.grid=[2,3]", r"model.grid=\[2, 3\] must be rows, columns and channels, such as \[32, 32, 3\], or \[\]"),
        ("model.grid=[2,x]", r"model.grid must be a list of whole numbers, such as \[32, 32, 3\]"),
        ("train.average_share=1.5", "train.average_share=1.5 must be at most 1"),
        ("search.operations=dense", r"must be a list of operations, such as \[attention, dense 8x\]"),
        ("model.d_ffn=wide", "d_ffn=wide must be a whole number from 1, or a multiple of d_model such as 4x"),
        ("model.window=3", "unknown key 'model.window'"),
        ("search.latncy.target=1", "unknown key 'search.latncy'; the nearest is 'search.latency.target'"),
        (
            "search.method=gumble",
            "search.method=gumble must be one of trials, gumbel; the nearest is gumbel",
        ),
        ("search.warmup_steps=6", "search.warmup_steps=6 needs search.method=gumbel"),
        ("search.temperature.end=0.2", "search.temperature.end=0.2 needs search.method=gumbel"),
        ("search.optimizer.lr=0.1", "search.optimizer.lr=0.1 needs search.method=gumbel"),
        ("search.split=shared", "search.split=shared needs search.method=gumbel"),
        ("model.tie_embeddings=true model.div_value=4", "model.div_value=4 needs model.tie_embeddings=false"),
        ("model.init=depth_scaled model.norm=post", "model.init=depth_scaled needs model.norm=pre, not post"),
        (
            "model.grid=[2,2,1] data.tokenizer=words",
            "counts bytes: it needs data.tokenizer=bytes and data.newline=keep",
        ),
        ("model.grid=[2,2,1] data.tokenizer=bytes data.newline=drop", "counts bytes: it needs data.tokenizer=bytes"),
        ("model.grid=[2,2,1] data.tokenizer=bytes train.short_share=0.5", "does not work with model.grid; give 0"),
        ("search.d_model=[64,x]", r"search.d_model=\[64, 'x'\] must be a list of whole numbers, .* or auto"),
        ("search.d_model=[64,64]", "search.d_model=.* names a size twice"),
        ("search.d_model=[50]", "search.d_model=50 must be even, and a multiple of 32, the channels of a head"),
        ("model.d_model=30 model.heads=2 search.d_model=[45]", "search.d_model=45 must be even, and a multiple of 15"),
        ("search.vocab_size=[900] data.tokenizer=words data.vocab_size=9", "search.vocab_size needs data.tokenizer"),
        ("search.vocab_size=auto", "search.vocab_size needs data.vocab_size, that of the reference"),
        ("search.d_model=auto search.method=gumbel", "search.d_model=auto needs search.method=trials"),
        ("search.latency.target=0ms", "search.latency.target=0ms must be a ratio such as 0.65 or a time"),
        ("search.latency.target=5ms", "search.latency.target=5ms needs search.latency.source=measured"),
        (
            "search.latency.timing=generation search.latency.source=flops",
            "timing=generation needs search.latency.source=measured",
        ),
        ("search.latency.source=onnx", "search.latency.source=onnx needs search.latency.timing=generation"),
        ("train.short_share=0.5 train.segment=63", "train.short_share=0.5 needs an even train.segment, not 63"),
    ],
)
def test_bad_values_and_options_that_exclude_each_other_are_reported(load, overrides, message):
    with pytest.raises(InputError, match=message):
        load(*overrides.split())


BAD_BLOCKS = {
    "attention, dens": "'dens' is no operation; known operations are attention, .*; the nearest is dense",
    "'': 4": "'' is no operation; known operations are",
    "[dense]": r"\['dense'\] is no block; a block is one operation, as `dense 8x` or",
    "{dense: 4x, conv: 3}": "is no block; a block is one operation, as `dense 8x` or",
    "attention width=3": "attention width=3: 'width' is no size; attention has heads=, key_heads=",
    "{dense: {d_ffn: }}": "needs one value for each size, as in `dense 8x`",
    "identity 3": "identity 3: '3' is no size; identity has no sizes",
    "dense 2x 8x": "dense 2x 8x needs one value for each size",
    "ah2h4": "ah2h4 needs one value for each size",
    "attention heads=3": "attention heads=3: heads=3 must divide d_model=128",
    "window 8 heads=4 key_heads=3": "window 8 heads=4 key_heads=3: key_heads=3 must divide heads=4",
    "dense 0": "dense 0: d_ffn=0 must be a whole number from 1, or a multiple of d_model such as 4x",
    "{dense: {d_ffn: 1.5}}": "d_ffn=1.5 must be a whole number from 1, or a multiple of d_model such as 4x",
    "dense 0.001x": "dense 0.001x: d_ffn=0 must be at least 1",
    "conv 4x": "conv 4x: kernel=4x must be a whole number from 1$",
    "conv 65": "conv 65: kernel=65 must be at most train.segment=64",
    "window 129": r"window 129: window=129 must be at most train.segment \+ train.memory, which is 128",
    "sparse_fixed 3 summary=4": "sparse_fixed 3 summary=4: summary=4 must be at most stride=3",
    "dense, attention, dense 4x": "dense and dense 4x are the same; candidates must differ",
    "d512, {dense: 4x}": "d512 and {'dense': '4x'} are the same; candidates must differ",
    "attention key_heads=4, attention heads=4": "attention key_heads=4 and attention heads=4 are the same",
}


@pytest.mark.parametrize("blocks", BAD_BLOCKS)
def test_bad_blocks_give_one_line_that_names_them_and_what_is_allowed(load, blocks):
    with pytest.raises(InputError, match=BAD_BLOCKS[blocks]) as error:
        load(text=f"search: {{operations: [{blocks}]}}\ntrain: {{steps: 5}}\n")
    assert str(error.value).startswith("search.operations: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {stepz: 3}\n", "unknown key 'train.stepz'; the nearest is 'train.steps'"),
        ("train: 3\n", "config.yaml: sections hold keys"),
        ("- a\n- b\n", "sections hold keys"),
        ("train: {steps: [\n", "is not YAML"),
        ("train:\n\tsteps: 3\n", "is not YAML: line 2, 'steps: 3': indent with spaces, not with a tab"),
        ("seed: 1\ntrain: {lr: 1\nmodel:\n", "line 3, 'model:': the bracket of line 2 must be closed before"),
        ("train: lr: 3\n", "line 1, 'train: lr: 3': expected one `key: value` in a line"),
        ("train:\n  lr: 1\n model:\n", "line 3, 'model:': lines of one section must begin in the same column"),
        ("trian\n", "unknown key 'trian'"),
        ("train: {steps: 3, epochs: 2}\n", "both given"),
        ("'': 3\n", "unknown key ''"),
        ("train: {lr:0.1, steps: 3}\n", "'lr:0.1' is one word: write a space after the colon"),
        ("search:\n  latency.target: 1\n", r"'latency.target': dots are .*; here write latency: {target: VALUE}"),
        ("data: {source: a, b.txt}\n", "'b.txt': dots are .*; put quotes around a text that holds a comma"),
        (
            "data: {vocab_size: 2,000}\n",
            "0 is no name of an option; write numbers without a comma, such",
        ),
        ("on: {steps: 3}\n", "True is no name of an option$"),
        ("data: {source: '${'}\n", "config.yaml"),
        ("seed: 2020-99-99\n", "config.yaml"),
        ("search: {operations: ['${x}']}\n", "interpolation"),
    ],
)
def test_bad_files_are_reported(load, text, message):
    with pytest.raises(InputError, match=message):
        load(text=text)


def test_bytes_have_no_vocabulary_size(load):
    assert load("data.tokenizer=bytes", "data.vocab_size=300").data.vocab_size is None


def test_an_empty_section_and_the_keys_of_a_run_are_accepted(load, tmp_path):
    assert load(text="stage: search\npattern: [dense]\ndata:\ntrain: {steps: 4}\n").train.steps == 4
    with pytest.raises(InputError, match=r"cannot read the configuration .*none.yaml: No such file"):
        load_config(tmp_path / "none.yaml", [])


def test_every_option_is_documented_with_its_default():
    text = options_help()
    for key, item in options():
        assert f"\n  {key}=" in "\n" + text
        assert item.metadata["help"]


def test_the_configuration_loads_without_torch():
    modules = "nas, nas.core.config_loading, nas.core.pattern, nas.core.run_folder, nas.derivation.runs, nas.prepare"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("segment", "memory", "stride"),
    [(64, 64, 8), (192, 192, 16), (1024, 1024, 32), (1024, 3072, 64), (1, 0, 1), (2, 1, 2)],
)
def test_the_default_stride_is_the_power_of_two_nearest_to_the_root_of_the_context(load, segment, memory, stride):
    shape = load(f"train.segment={segment}", f"train.memory={memory}").shape
    sizes = {"heads": 4, "key_heads": 4}
    assert resolve_block("sparse_strided", shape)[1] == {"stride": stride, **sizes}
    assert resolve_block("sparse_fixed", shape)[1] == {"stride": stride, "summary": min(4, stride), **sizes}
    assert resolve_block("window heads=2", shape)[1]["window"] == max(1, (segment + memory) // 4)


def test_operations_are_recorded_in_their_usual_spelling(load):
    text = "search: {operations: [d4x, {dense: {d_ffn: 1024}}, w7h2, attention heads=4, {conv: 3}, {conv: {}}]}\n"
    config = load("model.d_ffn=512", text=text + "train: {steps: 5}\n")
    assert config.search.operations == ["dense", "dense 1024", "window 7 heads=2", "attention", "conv 3", "conv"]


def test_each_method_has_candidates_that_differ_and_fit(load):
    six = ["attention", "dense", "dense 8x", "conv", "window", "identity"]
    assert load("train.steps=5").search.operations == six
    assert load("train.steps=5", "model.d_ffn=8x").search.operations == [name for name in six if name != "dense 8x"]
    short = load("train.steps=5", "train.segment=3", "train.memory=3").search.operations
    assert short == [name for name in six if name != "conv"]
    assert load("train.steps=5", "search.method=gumbel").search.operations == ["attention", "dense", "identity"]


@pytest.mark.parametrize(("optimizer", "lr"), [("muon", 0.01), ("adamw", 0.006)])
def test_the_optimizer_determines_the_rate_unless_it_is_given(load, optimizer, lr):
    assert load(f"train.optimizer={optimizer}").train.lr == lr
    train = load(f"train.optimizer={optimizer}", "train.lr=0.5", "train.weight_decay=0").train
    assert (train.lr, train.weight_decay) == (0.5, 0)


def test_short_segments_are_the_default_of_retraining_if_segments_are_long(load):
    grid = ["model.grid=[8,8,2]", "data.tokenizer=bytes"]
    assert short_share(load("train.segment=128")) == 0.85
    for more in ([], ["train.segment=127"], ["train.segment=129"], ["train.segment=128", *grid]):
        assert short_share(load(*more)) == 0
    assert short_share(load("train.segment=16", "train.short_share=0.5")) == 0.5
    assert short_share(load("train.segment=128", "train.short_share=0")) == 0
