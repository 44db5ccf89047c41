"""A folder that Transformers opens: code, weights with the mixture, and a fast tokenizer with the same ids."""

import ast
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from models.operations.registry import OPERATIONS
from nas.core.errors import InputError
from nas.core.files import write_text
from nas.core.pattern import resolve_block
from nas.data.vocabulary import UNKNOWN, Vocabulary
from nas.inference.language_model import LanguageModel
from nas.mixture.cache import decays_of
from nas.mixture.mixture import FITTED
from nas.retraining.weights import CODE, EXPORT_CONFIG, WEIGHTS
from nas.training.build import backbone_options, block_config
from nas.training.evaluation import evaluation_lengths

# In one file, the registry finds classes there.
FIND_CLASS = 'getattr(import_module(f"models.operations.{file}"), class_name)', "globals()[class_name]"
PAD = "<\ufdd0pad>"  # a noncharacter: hardly any text has it
SPACES = "".join(letter for letter in map(chr, range(0x3001)) if letter.isspace())  # as str.split()
CHECKED = 2000  # lines of random pieces that both tokenizers read


def model_code() -> str:
    """The text of modeling_par.py in one piece with all files of this project that it imports."""
    imports, bodies, seen = set(), [], set()

    def add(module: str) -> None:
        if not module.startswith(("models.", "nas.")) or module in seen:
            return
        seen.add(module)
        text = Path(find_spec(module).origin).read_text("utf-8")
        lines, (docstring, *others) = text.splitlines(), ast.parse(text).body
        found = [node for node in others if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in found:
            add(getattr(node, "module", ""))
            if getattr(node, "module", "") not in seen:
                imports.update(ast.unparse(type(node)(**{**vars(node), "names": [name]})) for name in node.names)
        for node in (docstring, *found):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        bodies.append(f"# {module}\n\n" + "\n".join(lines).strip().replace(*FIND_CLASS))

    for kind in OPERATIONS.values():
        add(f"models.operations.{kind.place.partition(':')[0]}")
    add(f"nas.inference.{Path(CODE).stem}")
    head = '"""What a model of par-nas needs, put together from its files."""\n\n' + "\n".join(sorted(imports))
    return "\n\n\n".join([head, *bodies]) + "\n"


def fast_tokenizer(vocabulary: Vocabulary):
    """A tokenizers.Tokenizer with the ids of the model. Raises InputError if none gives the same ones."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    own, pieces, keeps = vocabulary.tokenizer, vocabulary.pieces(), vocabulary.newline == "keep"
    if vocabulary.lowercase:
        raise InputError(
            "a tokenizer of Transformers lowercases by other rules, so data.lowercase=true is not possible"
        )
    if vocabulary.kind == "bytes":
        signs = {byte: sign for sign, byte in byte_signs().items()}
        tokenizer = Tokenizer(models.BPE({signs[piece[0]]: rank for rank, piece in enumerate(pieces)}, []))
        split = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.decoder = decoders.ByteLevel()
    elif vocabulary.kind == "words":
        words = {piece.decode().removeprefix(" "): rank for rank, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.WordLevel(words, UNKNOWN))
        split = [pre_tokenizers.Split(Regex(f"[{SPACES.replace(chr(10), '')}]+"), "removed")]
        glue = [decoders.Replace(joined, "\n") for joined in (" \n", "\n ")]
        tokenizer.decoder = decoders.Sequence([decoders.WordPiece("\ufdd0", False), decoders.Fuse(), *glue])
    else:
        if not (own.has_bytes and own.unit.pattern.startswith("\n| *")):
            raise InputError(
                "a tokenizer of Transformers has other ids than this SentencePiece model; only BPE with bytes, without "
                "normalisation and marks, is possible; train with data.tokenizer=bpe"
            )
        tokenizer = Tokenizer(models.BPE(*bpe_of(vocabulary), byte_fallback=True))
        split = [pre_tokenizers.Split(Regex("\n| *[^ \n]+| +"), "isolated")]
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    lines = pre_tokenizers.Split("\n", "isolated" if keeps else "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, *split])
    check_ids(tokenizer, vocabulary)
    tokenizer.add_special_tokens([AddedToken(PAD, special=True, normalized=False)])
    return tokenizer


def byte_signs() -> dict[str, int]:
    """{sign: byte} of the pre-tokenizer ByteLevel: printable Latin-1 as it is, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def bpe_of(vocabulary: Vocabulary) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """{text: id} of all pieces, and the merges in the order of SentencePiece's scores."""
    own, processor = vocabulary.tokenizer, vocabulary.tokenizer.processor
    keys, scores = {}, {}
    for rank, (index, text) in enumerate(zip(vocabulary.tokenizer_ids.tolist(), vocabulary.pieces(), strict=True)):
        if index == own.line_end:
            key = "\n"
        elif processor.is_byte(index):
            key = processor.id_to_piece(index)
        elif processor.is_control(index) or processor.is_unknown(index):
            key = f"<\ufdd0{index}>"  # hardly any text has it
        else:
            key = text.decode()
            scores[key] = processor.get_score(index)
        keys[key] = rank
    merges = []
    for key in sorted(scores, key=lambda key: -scores[key]):
        cuts = ((key[:place], key[place:]) for place in range(1, len(key)))
        merges += [(left, right) for left, right in cuts if left in scores and right in scores]
    return keys, merges


def check_ids(tokenizer, vocabulary: Vocabulary) -> None:
    """Raises InputError if a piece by itself, or between others, or random text has other ids."""
    generator, pieces = np.random.default_rng(0), [piece for piece in vocabulary.pieces() if piece]
    drawn = (generator.choice(len(pieces), size=generator.integers(1, 20)) for _ in range(CHECKED))
    texts = [b"a%ba" % piece for piece in pieces] + [b"".join(map(pieces.__getitem__, places)) for places in drawn]
    for text in (text.decode(errors="ignore") for text in texts):
        if tokenizer.encode(text).ids != vocabulary.encode(text).tolist():
            raise InputError(f"a tokenizer of Transformers gives other ids than this vocabulary for {text!r}")


def write_transformers(model: LanguageModel, tokenizer, folder: Path, training: dict) -> None:
    """Write the folder. tokenizer: of fast_tokenizer(). training: config.json of the format par."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    from nas.inference.modeling_par import ParConfig, ParForCausalLM

    options, segment_memory = model.config, evaluation_lengths(model.config)
    blocks = [resolve_block(block, options.shape) for block in model.pattern]
    backbone = backbone_options(options, model.tokenizer.size) | {"recompute": False}
    settings, arrays = mixture_of(model) if model.mixture else (None, {})
    config = ParConfig(
        [[name, dict(sizes)] for name, sizes in blocks],
        asdict(block_config(options)),
        backbone,
        *segment_memory,
        settings,
        training,
        model.tokenizer.size,
        tie_word_embeddings=backbone["tie_embeddings"],
        architectures=["ParForCausalLM"],
        dtype="float32",
    )
    classes = {"AutoConfig": "ParConfig", "AutoModelForCausalLM": "ParForCausalLM"}
    config.auto_map = {name: f"{Path(CODE).stem}.{own}" for name, own in classes.items()}
    config.pad_token_id = config.eos_token_id = None  # Transformers warns of ids outside the vocabulary here
    config.bos_token_id = model.tokenizer.line_end
    own = ParForCausalLM(config).eval()
    weights = {f"network.{name}": weight for name, weight in model.module.state_dict().items()}
    own.load_state_dict(weights | {f"mixture.array_{name}": array for name, array in arrays.items()})
    ids = {"bos_token_id": model.tokenizer.line_end, "pad_token_id": model.tokenizer.size}
    own.generation_config = GenerationConfig(**ids)
    own.save_pretrained(folder)
    (folder / WEIGHTS).chmod((folder / EXPORT_CONFIG).stat().st_mode)  # Transformers lets only its owner read it
    named = {"pad_token": PAD, "padding_side": "left", "clean_up_tokenization_spaces": False}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    write_text(folder / CODE, model_code())


def mixture_of(model: LanguageModel) -> tuple[dict, dict[str, torch.Tensor]]:
    """The settings for ParConfig, and the bytes of the arrays."""
    mixture = model.mixture
    arrays = {name: np.ascontiguousarray(getattr(mixture, name)) for name in FITTED}
    if mixture.counts:
        with np.load(mixture.file) as content:
            arrays |= dict(content)
    names = "states", "cache", "counts", "vocab_size"
    settings = {name: getattr(mixture, name) for name in names} | {"decays": decays_of(mixture.cache)}
    settings["arrays"] = {name: [own.dtype.name, [*own.shape]] for name, own in arrays.items()}
    return settings, {name: torch.from_numpy(own.reshape(-1).view(np.uint8).copy()) for name, own in arrays.items()}
