import re
import subprocess
import sys
from dataclasses import asdict

import pytest

from nas.core.config import Config, options
from nas.core.config_loading import load_config, options_help
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import resolve_block
from nas.training.passes import short_share
from tests.processes import ROOT


@pytest.fixture
def load(tmp_path):
    def load(*overrides, text="train: {steps: 5}\n"):
        (tmp_path / "config.yaml").write_text(text)
        return load_config(tmp_path / "config.yaml", list(overrides))

    return load


def test_overrides_win_over_the_file_and_the_file_over_defaults(load):
    text = "train: {lr: 1, steps: 7, clip: 3e-3}\nseed: 3\nmodel: {heads: 0}\n"
    config = load("train.lr=1e3", "search.method=gumbel", "search.optimizer.lr=5e-1", "model.heads=2", text=text)
    assert (config.train.lr, config.train.clip, config.train.steps, config.seed) == (1000, 0.003, 7, 3)
    assert (config.search.optimizer.lr, config.model.heads) == (0.5, 2)
    assert config.model.d_model == Config().model.d_model
    assert load().search.operations != [] and Config().search.operations == []
    assert load("train.epochs=2").train.steps is None  # the later of steps and epochs wins
    config = load("train.steps=9", text="train: {epochs: 3}\n")
    assert (config.train.steps, config.train.epochs) == (9, None)


TEXTS = ["2024_10", "007", "12:30", "no", "1e3", "~", "null", "Book #1.txt", " a=b ", "${seed}", "a???"]
TEXTS += [f"{sign}a" for sign in "[{%&*!@~'-"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_arrives_unchanged_from_the_command_line_and_from_a_recorded_configuration(load, text, tmp_path):
    config = load(f"data.source={text}", f"data.cache={text}")
    assert (config.data.source, config.data.cache) == (text, text)
    write_yaml(tmp_path / "recorded.yaml", asdict(config))
    assert load_config(tmp_path / "recorded.yaml", []) == config
    assert load(f"train.init_from={text}").train.init_from == (None if text == "null" else text)


def test_values_of_other_options_are_yaml(load):
    config = load("data.vocab_size=", "model.cutoffs=[5, 7]", "model.d_ffn=512", "search.operations=[d8x, {conv: 3}]")
    assert (config.data.vocab_size, config.model.cutoffs, config.model.d_ffn) == (None, [5, 7], 512)
    assert config.search.operations == ["dense 8x", "conv 3"]
    assert load("model.cutoffs=auto", "model.dropout=auto", "model.ngram_rows=auto").model.cutoffs == "auto"
    assert load("data.tokenizer=bytes", "data.vocab_size=300").data.vocab_size is None  # bytes have none


BAD_VALUES = {
    "a whole number of at least 1, or null": "train.steps=many true 0 1e3",
    "a whole number of at least 0": "train.memory=-1",
    f"a whole number of at least 0 and at most {2**63 - 1}": f"seed={2**63}",
    "an even number of at least 2": "model.d_model=33",
    "a number above 0, or null": "train.lr=fast nan 1e999 0",
    "a number of at least 0": "train.clip=null",
    "a number of at least 0 and below 1, or auto": "model.dropout=1 -0.1 true Auto",
    "a number of at least 0 and at most 1": "train.average_share=1.5",
    "true or false": "data.lowercase=maybe 3",
    "one of auto, cpu, cuda; the nearest is cuda": "train.device=gpu",
    "one of pre, post; the nearest is pre": "model.norm=Pre",
    "one of none, flops, measured, onnx, or a file such as table.yaml; the nearest is measured": "search.latency.source"
    "=measure",
    "a number above 0, or a time such as 2.5ms": "search.latency.target=0ms",
    "a whole number of at least 1, or a multiple of d_model such as 4x": "model.d_ffn=wide",
    "a list of increasing whole numbers from 1, such as [250, 2500], or auto": "model.cutoffs=[5,2] [0,2] [5,7.5] 7",
    "a list of up to 4 whole numbers from 1, or auto": "model.ngram_rows=[1,2,3,4,5]",
    "rows, columns and channels, such as [32, 32, 3], or []": "model.grid=[2,3] [2,3,0]",
    "a list of operations, such as [attention, dense 8x]": "search.operations=dense",
    "a list of different even numbers, such as [64, 128], or auto": "search.d_model=[64,x] [64,64] [45]",
    "a list of different numbers from 2, such as [2000, 4000], or auto": "search.vocab_size=[1]",
}


@pytest.mark.parametrize("allowed", BAD_VALUES)
def test_bad_values_are_reported_with_all_that_is_allowed(load, allowed):
    key, _, values = BAD_VALUES[allowed].partition("=")
    for value in values.split():
        message = re.escape(f"{key}={value.replace(',', ', ')} must be {allowed}")
        with pytest.raises(InputError, match=f"^{message}$"):
            load(f"{key}={value}")
        with pytest.raises(InputError, match=f"config.yaml: {message}$"):
            load(text=f"{{{key.replace('.', ': {')}: {value}{'}' * key.count('.')}}}")


BAD_OVERRIDES = [
    ("trian.steps=3", "unknown key 'trian.steps'; the nearest is 'train.steps'"),
    ("train.learning_rate=3", "unknown key 'train.learning_rate'; the nearest is 'train.lr'"),
    ("model.num_heads=3", "unknown key 'model.num_heads'; the nearest is 'model.heads'"),
    ("lr=3", "unknown key 'lr'; the nearest is 'train.lr'"),
    ("model.window=3", "unknown key 'model.window'"),
    ("search.latncy.target=1", "unknown key 'search.latncy.target'; the nearest is 'search.latency.target'"),
    ("train=4", "train=4: sections hold keys with values, such as `train: {steps: 100}`"),
    ("train.steps", "'train.steps' is not of the form section.key=value"),
    ("=3", "'=3' is not of the form section.key=value"),
    ("model.cutoffs=[", r"model.cutoffs=\[ must be a list"),
    ("train.steps=null", "train.steps and train.epochs are both null"),
    ("model.heads=3", "model.heads=3 must divide model.d_model=128: one of 1, 2, 4,"),
    ("search.warmup_steps=6", "search.warmup_steps=6 needs search.method=gumbel"),
    ("search.temperature.end=0.2", "search.temperature.end=0.2 needs search.method=gumbel"),
    ("search.optimizer.lr=0.1", "search.optimizer.lr=0.1 needs search.method=gumbel"),
    ("search.latency.weight=2", "search.latency.weight=2.0 needs search.method=gumbel"),
    ("search.d_model=auto search.method=gumbel", "search.d_model=auto needs search.method=trials"),
    ("model.tie_embeddings=true model.div_value=4", "model.div_value=4 needs model.tie_embeddings=false"),
    ("model.init=depth_scaled model.norm=post", "model.init=depth_scaled needs model.norm=pre, not post"),
    ("model.grid=[2,2,1] data.tokenizer=words", "counts bytes: it needs data.tokenizer=bytes and data.newline=k"),
    ("model.grid=[2,2,1] data.tokenizer=bytes data.newline=drop", "counts bytes: it needs data.tokenizer=bytes"),
    ("model.grid=[2,2,1] data.tokenizer=bytes train.short_share=0.5", "does not work with model.grid; give 0"),
    ("search.d_model=[50]", "search.d_model=50 must be a multiple of 32, the channels of a head"),
    ("search.vocab_size=[900] data.tokenizer=words data.vocab_size=9", "search.vocab_size needs data.tokenizer"),
    ("search.vocab_size=auto", "search.vocab_size needs data.vocab_size, that of the reference"),
    ("search.latency.target=5ms", "search.latency.target=5ms needs search.latency.source=measured"),
    ("search.latency.timing=generation search.latency.source=flops", "generation needs search.latency.source=measur"),
    ("search.latency.source=onnx", "search.latency.source=onnx needs search.latency.timing=generation"),
    ("train.short_share=0.5 train.segment=63", "train.short_share=0.5 needs an even train.segment, not 63"),
]
BAD_TEXTS = [
    ("train: {stepz: 3}\n", "config.yaml: unknown key 'train.stepz'; the nearest is 'train.steps'"),
    ("train: 3\n", "config.yaml: train=3: sections hold keys"),
    ("- a\n- b\n", "sections hold keys"),
    ("train: {steps: [\n", "is not YAML"),
    ("train:\n\tsteps: 3\n", "is not YAML: line 2, 'steps: 3': indent with spaces, not with a tab"),
    ("seed: 1\ntrain: {lr: 1\nmodel:\n", "line 3, 'model:': the bracket of line 2 must be closed before"),
    ("train: lr: 3\n", "line 1, 'train: lr: 3': expected one `key: value` in a line"),
    ("train:\n  lr: 1\n model:\n", "line 3, 'model:': lines of one section must begin in the same column"),
    ("trian\n", "config.yaml is no configuration: sections hold keys"),
    ("train: {steps: 3, epochs: 2}\n", "both given"),
    ("'': 3\n", "unknown key ''"),
    ("train: {lr:0.1, steps: 3}\n", "'lr:0.1' is one word: write a space after the colon"),
    ("search:\n  latency.target: 1\n", r"'latency.target': dots are .*; here write latency: {target: VALUE}"),
    ("data: {source: a, b.txt}\n", "'b.txt': dots are .*; put quotes around a text that holds a comma"),
    ("data: {vocab_size: 2,000}\n", "0 is no name of an option; write numbers without a comma, such"),
    ("on: {steps: 3}\n", "True is no name of an option$"),
    ("seed: 2020-99-99\n", "config.yaml"),
    ("seed: 2\ntrain: {lr: 1, steps: 2, lr: 3}\n", "line 2, .*: a key may occur only once in a section"),
    ("data: {source: 2024}\n", "config.yaml: data.source=2024 must be text; put quotes around it$"),
    ("data: {source: no}\n", "data.source=false must be text; put quotes around it$"),
    ("data: {source: [a]}\n", r"data.source=\[a\] must be text; put"),
    ("train: {device: [é]}\n", r"train.device=\[é\] must be one of auto, cpu, cuda$"),
    ("data: {source: }\n", "data.source=null must be text; put"),
    ("data: {source: {a: 1}}\n", "unknown key 'data.source.a'; the nearest is 'data.source'"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_OVERRIDES)
def test_unknown_keys_and_options_that_exclude_each_other_are_reported(load, overrides, message):
    with pytest.raises(InputError, match=message):
        load(*overrides.split())


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
def test_bad_files_are_reported(load, text, message):
    with pytest.raises(InputError, match=message):
        load(text=text)


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
    "dense, dense": "dense and dense are the same; candidates must differ",
    "dense, attention, dense 4x": "dense and dense 4x are the same; candidates must differ",
    "d512, {dense: 4x}": "d512 and {'dense': '4x'} are the same; candidates must differ",
    "attention key_heads=4, attention heads=4": "attention key_heads=4 and attention heads=4 are the same",
}


@pytest.mark.parametrize("blocks", BAD_BLOCKS)
def test_bad_blocks_give_one_line_that_names_them_and_what_is_allowed(load, blocks):
    with pytest.raises(InputError, match=BAD_BLOCKS[blocks]) as error:
        load(text=f"search: {{operations: [{blocks}]}}\ntrain: {{steps: 5}}\n")
    assert str(error.value).startswith("search.operations: ") and "\n" not in str(error.value)


def test_an_empty_section_and_the_keys_of_a_run_are_accepted(load, tmp_path):
    assert load(text="stage: search\npattern: [dense]\ndata:\ntrain: {steps: 4}\n").train.steps == 4
    with pytest.raises(InputError, match=r"cannot read the configuration .*none.yaml: No such file"):
        load_config(tmp_path / "none.yaml", [])


def test_every_option_is_documented_with_its_default():
    text = options_help()
    for key, option in options().items():
        assert f"\n  {key}=" in "\n" + text and option.help
    assert "gumbel: share of text" in text and "[trials | gumbel]" in text


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
