"""Folders of nas.export --format transformers, by Transformers and without this project."""

import ast
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from nas import load_model
from nas.core.errors import InputError
from nas.data.corpus import prepare
from nas.data.vocabulary import VOCABULARY, SentencePieceTokenizer, Vocabulary
from nas.inference.language_model import LanguageModel
from nas.inference.transformers_folder import CODE, PAD, fast_tokenizer, model_code, write_transformers
from nas.training.build import build_fixed
from nas.training.device import choose_runtime
from tests.making import BLOCKS
from tests.processes import ROOT, refuse, succeed

transformers = pytest.importorskip("transformers")
ALL_PARTS = "mixture.states=20", "mixture.cache=[1,2,3]", "mixture.counts=4"
PIECES = "data.tokenizer=bpe", "data.vocab_size=310"
LENGTHS = "train.segment=8", "train.memory=8", "evaluate.segment=8", "evaluate.memory=6"
TEXT = "\nthe old man sees two houses .\n a red fox  follows the na\u00efve king\n\n\u4e2d the river .\n"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def copies_of_code(tmp_path_factory):
    """Transformers copies the code of a folder to a place from which it imports it."""
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", place)
        yield


def opened(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return model, transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory, small_yaml) -> tuple[Path, Path]:
    """A run with all parts of a mixture, and its folder."""
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "pattern.yaml").write_text("format: par-pattern/2\nblocks: [window 6, dense, linear, attention, conv]\n")
    options = *PIECES, *LENGTHS, *ALL_PARTS, "model.ngram_rows=[13,11]", "model.cutoffs=[30]", "train.steps=30"
    succeed("retrain", folder / "pattern.yaml", small_yaml, "--run", folder / "run", *options)
    told = succeed("export", folder / "run", "--out", folder / "out", "--format", "transformers")
    assert "modeling_par.py" in told
    return folder / "run", folder / "out"


@pytest.fixture(scope="module")
def folder(made):
    return made[1]


@pytest.fixture(scope="module")
def loaded(folder):
    return opened(folder)


def tokens_of(model: LanguageModel, text: str = TEXT) -> torch.Tensor:
    return torch.from_numpy(model.tokenizer.encode(text).astype(np.int64))[None]


def log_p(model, ids: torch.Tensor, **given) -> torch.Tensor:
    """The log-probability of each token but the first [B, L - 1]."""
    found = model(input_ids=ids, **given).logits[:, :-1]
    return found.gather(2, ids[:, 1:, None])[..., 0]


def test_the_code_comes_from_the_files_of_this_project(folder):
    text = (folder / CODE).read_text()
    assert text == model_code()
    defined = Counter()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined[node.name] += 1
        elif isinstance(node, ast.Assign):
            defined.update(one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            assert (getattr(node, "module", "") or node.names[0].name).split(".")[0] not in ("models", "nas")
            defined.update(name.asname or name.name for name in node.names)
    assert max(defined.values()) == 1, "two files mean different things by one name"


OTHERS = {
    "post, tied, adaptive softmax, n-grams": ["model.norm=post", "model.tie_embeddings=true", "model.cutoffs=[5,30]"],
    "full softmax, untied": ["model.tie_embeddings=false", "model.ngram_rows=[]"],
    "narrow tails": ["model.tie_embeddings=false", "model.cutoffs=[5,30]", "model.div_value=2"],
    "images": ["model.grid=[2,3,1]", "data.tokenizer=bytes", "mixture.states=0", "train.segment=12", "train.memory=6"],
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_each_network_has_the_log_probabilities_of_its_evaluation(options, small_config, tmp_path):
    config = small_config(*PIECES, *LENGTHS, "model.ngram_rows=[13,11]", "model.dropout=0.1", *options)
    blocks = [block for name, block in BLOCKS.items() if not (config.model.grid and name == "linear")]
    vocabulary = Vocabulary.load(prepare(config.data) / VOCABULARY)
    torch.manual_seed(3)
    module = build_fixed(blocks, config, vocabulary.size).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias") or name.startswith("ngrams."):
            torch.nn.init.normal_(parameter, std=0.3)
    model = LanguageModel(module, vocabulary, blocks, config, choose_runtime(config.train))
    write_transformers(model, fast_tokenizer(vocabulary), tmp_path, {})
    other, _ = opened(tmp_path)
    ids = tokens_of(model)
    nll, _ = model.read_network(ids[0].numpy())
    with torch.no_grad():
        np.testing.assert_allclose(-log_p(other, ids)[0].numpy(), nll, rtol=0, atol=1e-5)
    tied = (
        other.network.head.weight is other.network.embedding.weight if hasattr(other.network.head, "weight") else False
    )
    assert tied == (config.model.tie_embeddings is True)
    other.train()  # the differentiable path, without dropout
    for part in other.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    np.testing.assert_allclose(-log_p(other, ids)[0].detach().numpy(), nll, rtol=0, atol=1e-5)


@torch.no_grad()
def test_texts_padding_and_segments_have_the_figures_of_the_run(made, loaded):
    (run, _), (model, tokenizer) = made, loaded
    own = load_model(run, "cpu")
    score = own.score(TEXT)
    ids = tokens_of(own)
    assert tokenizer(TEXT).input_ids == ids[0].tolist()
    whole = log_p(model, ids)
    np.testing.assert_allclose(-whole[0].numpy(), score.nll[1:], rtol=0, atol=1e-5)
    for more in range(1, 8):  # it ends at each place of a segment
        text = TEXT + "\n" * more
        ended = log_p(model, tokens_of(own, text))[0].numpy()
        np.testing.assert_allclose(-ended, own.score(text).nll[1:], rtol=0, atol=1e-5)
    # In segments, with the state.
    state, parts = None, []
    for piece in ids[:, : ids.shape[1] // 8 * 8].split(8, dim=1):
        found = model(input_ids=piece, cache=state, use_cache=True)
        state = found.get("cache", found.get("past_key_values"))
        parts.append(found.logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(input_ids=ids[:, : 8 * len(parts)]).logits, rtol=0, atol=1e-5)
    # Left padding.
    texts = [TEXT, "\n", TEXT[:9], TEXT[5:40]]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch.input_ids[1, 0] == tokenizer.pad_token_id == own.tokenizer.size
    found = model(**batch).logits
    for row, text in enumerate(texts):
        alone = model(input_ids=tokens_of(own, text)).logits[0]
        torch.testing.assert_close(found[row, -len(alone) :], alone, rtol=0, atol=1e-5)
        kept = model(**batch, logits_to_keep=1).logits
        torch.testing.assert_close(kept[row, 0], alone[-1], rtol=0, atol=1e-5)
    # Padding at other places, which nothing reads: each place has the logits of the token before.
    mask, padded = torch.ones(1, 12, dtype=torch.long), ids[:, :12].clone()
    mask[0, [0, 4, 5, 11]], padded[0, 4] = 0, tokenizer.pad_token_id
    rest = model(input_ids=ids[:, :12][mask > 0][None]).logits
    found = model(input_ids=padded, attention_mask=mask).logits
    torch.testing.assert_close(found[mask > 0], rest[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0, -1], rest[0, -1], rtol=0, atol=1e-5)
    # No text at all begins with a line end.
    empty = tokenizer(["", "\n"], return_tensors="pt", padding=True)
    found = model(**empty, logits_to_keep=torch.tensor([0])).logits
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    # The loss is that of Transformers: the mean over targets, those of -100 left out.
    labels = ids.clone()
    labels[:, :5] = -100
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, -whole[:, 4:].mean())
    for texts in (["\nthe old"], ["\nthe old", TEXT]):  # with padding, whose labels are no targets
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        if len(texts) > 1:
            labels[1] = -100
        torch.testing.assert_close(model(**batch, labels=labels).loss, -log_p(model, tokens_of(own, texts[0])).mean())


def test_generation_draws_what_the_run_draws(made, loaded):
    (run, _), (model, tokenizer) = made, loaded
    own = load_model(run, "cpu")
    for prompt in (TEXT[:60], "\nthe"):  # the first is longer than a segment, and ends within one
        drawn = own.generate(prompt, tokens=200, temperature=0)
        ids = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**ids, max_new_tokens=200, do_sample=False)
        assert tokenizer.decode(found[0, ids.input_ids.shape[1] :]) == drawn
    # A batch of prompts with padding, and without a state: only its attention sees fewer positions.
    texts = ["\nthe old", "\n", TEXT[:60]]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    found = model.generate(**batch, max_new_tokens=20, do_sample=False)
    for row, text in enumerate(texts):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=20, do_sample=False)
        assert found[row, -20:].tolist() == alone[0, -20:].tolist()
    assert model.generate(max_new_tokens=3, do_sample=False)[0, 0] == own.tokenizer.line_end
    begun = model.generate(**ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    state = begun.get("cache", begun.get("past_key_values"))
    (more,) = model.generate(begun.sequences, cache=state, max_new_tokens=4, do_sample=False)
    assert more.tolist() == model.generate(**ids, max_new_tokens=7, do_sample=False)[0].tolist()
    # Rows end at different steps.
    several = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": found[0, -3].item()}
    lengths, drawn = set(), model.generate(**batch, **several)
    most = drawn.shape[1] - batch.input_ids.shape[1]
    for row, ended in enumerate(drawn):
        (alone,) = model.generate(**tokenizer(texts[row], return_tensors="pt"), **several)
        new = alone[len(tokenizer(texts[row]).input_ids) :].tolist()
        lengths.add(len(new))
        assert ended[batch.input_ids.shape[1] :].tolist() == new + [tokenizer.pad_token_id] * (most - len(new))
    assert len(lengths) > 1
    (empty,) = model.generate(**tokenizer("", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    assert tokenizer.decode(empty) == own.generate("", tokens=9, temperature=0)
    short = tokenizer("\nthe", return_tensors="pt")
    several = {"max_new_tokens": 4, "use_cache": False, "do_sample": False}
    assert (
        model.generate(**short, **several).tolist() == model.generate(**short, **several | {"use_cache": True}).tolist()
    )


def test_beams_and_samples_have_the_scores_of_their_texts(loaded):
    model, tokenizer = loaded
    ids = tokenizer(["\nthe", "\n"], return_tensors="pt", padding=True)
    more = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 5}
    beams = model.generate(**ids, num_beams=3, num_return_sequences=3, do_sample=False, length_penalty=0.0, **more)
    transformers.set_seed(1)
    drawn = model.generate(**ids, do_sample=True, top_k=0, num_return_sequences=3, **more)
    chosen = model.compute_transition_scores(drawn.sequences, drawn.scores, normalize_logits=True).sum(dim=1)
    assert len({tuple(one) for one in drawn.sequences.tolist()}) > 3
    for sequences, scores in ((beams.sequences, beams.sequences_scores), (drawn.sequences, chosen)):
        for row, score in zip(sequences, scores, strict=True):
            with torch.no_grad():
                own = log_p(model, row[row != tokenizer.pad_token_id][None])[0, -5:].sum()
            torch.testing.assert_close(score, own, rtol=0, atol=1e-4)


def test_other_numbers_and_changed_weights(folder, loaded):
    model, tokenizer = loaded
    ids = tokenizer(TEXT, return_tensors="pt")
    narrow = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    with torch.no_grad():
        wide, found = model(**ids).logits, narrow(**ids).logits
    assert found.dtype == torch.bfloat16 and (found.float() - wide).exp().sub(1).abs().mean() < 0.1
    narrow.train()(**ids, labels=ids.input_ids).loss.backward()
    assert all(own.grad.isfinite().all() for own in narrow.parameters() if own.grad is not None)
    with pytest.raises(ValueError, match="give bfloat16 or float32"):
        narrow.half()(**ids)
    changed = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        changed(**ids)
        for parameter in changed.parameters():
            parameter.data += 0.1  # as fused optimizers: without a new version
        found = changed.eval()(**ids).logits
        changed.made = None, None
        torch.testing.assert_close(found, changed(**ids).logits, rtol=0, atol=0)
    assert (found - wide).abs().max() > 1e-3


def test_a_saved_folder_is_the_same_model(loaded, tmp_path):
    model, tokenizer = loaded
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    other, again = opened(tmp_path)
    ids = tokenizer(TEXT, return_tensors="pt")
    assert again(TEXT).input_ids == ids.input_ids[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(other(**ids).logits, model(**ids).logits, rtol=0, atol=0)


HARD = [
    *("", " ", "   ", "\t", "a\tb", "\n", "\n\n \n", " a", "a ", "  a  b   ", "a" * 300, " " * 137, "-" * 99, "\r\n"),
    *("\u2581", "a\u2581b", " \u2581 ", "\ue000\uf8ff", "\u0378", "\U0010ffff", "\ufdd0", "e\u0301\u0323", "\ufb01"),
    *(
        "<unk>",
        "<s> </s>",
        "<0x41>",
        "\u2047",
        "<pad>",
        "<|endoftext|>",
        "\u4e2d\u6587",
        "\U0001f600",
        "\x00",
        "\x1c \x85",
    ),
    *("\u2028", "\xa0a\u3000b", "\u2585", "\ufeff", "\u0130", "12 345", "x" + " " * 9 + "y"),
]


@pytest.mark.parametrize("kind", ["bpe", "bytes", "words", "bpe without line ends"])
def test_tokens_have_the_ids_of_the_run(kind, small_config, tmp_path):
    options = [f"data.tokenizer={kind.split()[0]}", *(["data.vocab_size=320"] if "bpe" in kind else [])]
    config = small_config(*options, *(["data.newline=drop"] if "without" in kind else []))
    vocabulary = Vocabulary.load(prepare(config.data) / VOCABULARY)
    kept = {"tokenizer_object": fast_tokenizer(vocabulary), "pad_token": PAD}
    transformers.PreTrainedTokenizerFast(**kept).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sources = [path.read_text() for path in sorted(ROOT.glob("models/**/*.py"))]
    lines = [line for text in sources for line in text.splitlines(keepends=True)]
    generator = np.random.default_rng(0)
    mixed = ["".join(generator.choice(HARD, 6)) for _ in range(300)]
    for text in [*HARD, *mixed, *lines, *sources, TEXT]:
        ids = vocabulary.encode(text).tolist()
        found = tokenizer(text, return_offsets_mapping=True)
        assert found.input_ids == ids, repr(text)
        if kind in ("bpe", "bytes"):
            assert tokenizer.decode(ids) == text
            places = [place for offset in found.offset_mapping for place in range(*offset)]
            assert set(places) == set(range(len(text)))  # those of bytes of one character meet
        assert tokenizer.decode(ids) == vocabulary.decode(np.array(ids, int)).decode(errors="replace")
    assert len(tokenizer) == vocabulary.size + 1


def test_what_a_folder_cannot_hold_is_refused_by_name(small_yaml, small_config, trained, tmp_path):
    unigram = SentencePieceTokenizer.train(TEXT.split("\n") * 50, "unigram", 285, True)
    with pytest.raises(InputError, match=r"other ids than this SentencePiece model.*data.tokenizer=bpe"):
        fast_tokenizer(Vocabulary.unranked(unigram, False))
    vocabulary = Vocabulary.load(trained["sentencepiece"] / VOCABULARY)
    vocabulary.lowercase = True
    with pytest.raises(InputError, match=r"data\.lowercase=true"):
        fast_tokenizer(vocabulary)
    (tmp_path / "none.yaml").write_text("format: par-pattern/2\nblocks: []\n")
    succeed("retrain", tmp_path / "none.yaml", small_yaml, "--run", tmp_path / "none", "mixture.counts=2", *PIECES)
    told = refuse("export", tmp_path / "none", "--out", tmp_path / "out", "--format", "transformers")
    assert "a cache and counts without a network" in told
    assert not (tmp_path / "out").exists()


TRAIN = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline

try:
    import nas
    sys.exit("this project is here")
except ImportError:
    pass
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
texts = ["\\nthe old man sees two houses .", "\\n a red fox"]
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
(written,), (other,) = writer(texts, max_new_tokens=12, do_sample=False, batch_size=2)
ids = tokenizer(texts[1], return_tensors="pt")
alone = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0])
assert other["generated_text"] == alone, (other, alone)
assert written["generated_text"].startswith(texts[0])
rows = []
for text in texts * 4:
    row = tokenizer(text, padding="max_length", max_length=30)
    row["labels"] = [one if seen else -100 for one, seen in zip(row["input_ids"], row["attention_mask"])]
    rows.append(row)
given = TrainingArguments(out, max_steps=2, learning_rate=0.01, report_to="none", use_cpu=True, save_strategy="no")
before = model.network.embedding.weight.clone()
trainer = Trainer(model, given, train_dataset=rows)


def loss_in_training():
    torch.manual_seed(0)
    with torch.no_grad():
        inputs = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        return model.train()(**inputs).loss


first, judged = loss_in_training(), trainer.evaluate(rows)["eval_loss"]
trainer.train()
assert loss_in_training() < first and trainer.evaluate(rows)["eval_loss"] != judged
assert not torch.equal(before, model.network.embedding.weight)
trainer.save_model(out)
tokenizer.save_pretrained(out)
"""


def test_without_this_project_pipeline_and_trainer_work_and_a_run_goes_on(made, small_yaml, tmp_path):
    run, folder = made
    (tmp_path / "use.py").write_text(TRAIN)
    site = [str(Path(package.__file__).parents[1]) for package in (transformers, torch)]
    command = [sys.executable, "-S", "-I", "-c", f"import sys; sys.path += {site}; exec(open('use.py').read())"]
    command += [folder, tmp_path / "tuned"]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    options = *PIECES, *LENGTHS, *ALL_PARTS, "model.ngram_rows=[13,11]", "model.cutoffs=[30]", "train.steps=2"
    origin = f"train.init_from={tmp_path / 'tuned'}"
    goes_on = "retrain", run.parent / "pattern.yaml", small_yaml, "--run", tmp_path / "on", *options, origin
    assert f"copy {VOCABULARY}/" in refuse(*goes_on)
    (folder / VOCABULARY).rename(tmp_path / "tuned" / VOCABULARY)
    succeed(*goes_on, "train.lr=1e-9", "train.muon_lr=1e-9")
    (tmp_path / "tuned" / VOCABULARY).rename(folder / VOCABULARY)
    tuned, _ = opened(tmp_path / "tuned")
    went_on = load_model(tmp_path / "on", "cpu").module
    torch.testing.assert_close(went_on.embedding.weight, tuned.network.embedding.weight, rtol=0, atol=1e-4)
    assert "is for Transformers; give the run folder" in refuse("score", folder, tmp_path / "use.py")


def test_lm_eval_has_the_bits_per_byte_of_the_run(made, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    run, folder = made
    lines = ["the old man sees two houses .", "a red fox follows the na\u00efve king"]
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "text.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    own = load_model(run, "cpu")
    given = {"pretrained": str(folder), "trust_remote_code": True, "prefix_token_id": own.tokenizer.line_end}
    found = lm_eval.simple_evaluate(model="hf", model_args=given, tasks=[task], device="cpu", batch_size=2)
    # lm_eval gives the line end before each text, so it predicts the first token too, and counts the bytes of the text.
    nll = sum(np.nansum(own.score(line, by_line=True).nll) for line in lines)
    bits = nll / np.log(2) / sum(len(line.encode()) for line in lines)
    assert abs(found["results"]["own"]["bits_per_byte,none"] - bits) < 1e-4
