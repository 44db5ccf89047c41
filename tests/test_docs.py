"""Links, option keys, files, commands and flags in the documentation exist in the repository."""

import re
import shlex
from functools import cache

import pytest
import yaml

from nas.core.config import options
from tests.processes import ROOT

FOLDERS = ("*.md", "docs/*.md", "experiments/**/*.md")
MARKDOWN = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(folder))
GUIDES = ["README.md", *(name for name in MARKDOWN if name.startswith("docs/"))]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
KEY = re.compile(r"\b(?:data|model|train|search|evaluate)(?:\.[a-z_][a-z_0-9]*)+")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
FILE_ENDINGS = ("py", "yaml", "txt", "bin", "log", "md", "safetensors", "onnx")

KEYS = {*options()}
SECTIONS = {key.rsplit(".", count)[0] for key in KEYS for count in range(1, key.count(".") + 1)}


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def prose(text: str) -> str:
    return FENCED.sub("", text)


def code(text: str) -> list[str]:
    """Every line of a fenced block without a language, and every inline code span."""
    blocks = [body for language, body in FENCED.findall(text) if not language]
    return [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *INLINE.findall(prose(text))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    titles = [re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in HEADING.findall(prose(text))]
    return {title.replace(" ", "-") for title in titles}


def scripts_in(line: str) -> list[tuple[str, list[str]]]:
    """(file, arguments) of each program of this project that a line runs."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a line with an apostrophe is not a command
        return []
    for at, word in enumerate(words):
        if word == "-m" and at and words[at - 1].endswith("python") and words[at + 1].startswith("nas."):
            return [(words[at + 1].replace(".", "/") + ".py", words[at + 2 :])]
        started = at and (words[at - 1].endswith("python") or words[at - 1] == "--")
        if word.endswith(".py") and (started or (at == 0 and words[1:])):
            return [(word, words[at + 1 :])]
    return []


@cache
def flags_of(script: str) -> set[str]:
    """The flags that the source of a script defines."""
    source = text_of(script)
    if "add_arguments(" in source:  # flags that search.py and retrain.py share
        source += text_of("nas/core/config_loading.py")
    return {"--help", *re.findall(r"[\"'](--[a-z][a-z-]*)[\"']", source)}


@cache
def all_flags() -> set[str]:
    scripts = [*ROOT.glob("*.py"), *ROOT.glob("nas/*.py"), *ROOT.glob("experiments/*/*.py")]
    return set().union(*(flags_of(str(path.relative_to(ROOT))) for path in scripts))


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_have_targets(name):
    text = text_of(name)
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target} leads to no file"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{name}: {target} leads to no heading"


@pytest.mark.parametrize("name", [*GUIDES, "CONTRIBUTING.md"])
def test_options_exist(name):
    python = {body for language, body in FENCED.findall(text_of(name)) if language == "python"}
    for key in KEY.findall(FENCED.sub(lambda block: "" if block[2] in python else block[0], text_of(name))):
        if key.rpartition(".")[2] not in FILE_ENDINGS:
            assert key in KEYS | SECTIONS, f"{name}: there is no option {key}"


@pytest.mark.parametrize("name", GUIDES)
def test_configurations_hold_known_options(name):
    """YAML blocks whose keys are sections of the configuration."""
    for language, body in FENCED.findall(text_of(name)):
        content = yaml.safe_load(body) if language == "yaml" else {}
        if "format" not in content:
            for key in flat_keys(content):
                assert key in KEYS, f"{name}: there is no option {key}"


def flat_keys(content: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in content.items():
        keys += flat_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return keys


@pytest.mark.parametrize("name", [*GUIDES, "CONTRIBUTING.md"])
def test_commands_and_flags_exist(name):
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))
    for line in code(text_of(name)):
        commands = scripts_in(line)
        for script, arguments in commands:
            assert (ROOT / script).is_file(), f"{name}: there is no {script}"
            for flag in FLAG.findall(" ".join(arguments)):
                assert flag in flags_of(script), f"{name}: {script} has no {flag}"
        if line.startswith("--"):
            assert set(FLAG.findall(line)) <= all_flags(), f"{name}: no program has {line}"
        if made := re.search(r"\bmake ([a-z]+)", line):
            assert made[1] in targets, f"{name}: the Makefile has no {made[1]}"


@pytest.mark.parametrize("name", [*GUIDES, "CONTRIBUTING.md"])
def test_files_and_modules_exist(name):
    """Paths and modules of the repository that appear in code."""
    for word in " ".join(code(text_of(name))).split():
        if re.fullmatch(r"(models|nas|experiments|tests|docs)/[\w./-]*", word):
            assert (ROOT / word).exists(), f"{name}: there is no {word}"
        if re.fullmatch(r"nas(\.[a-z_]+)+", word):
            path = ROOT / word.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{name}: there is no module {word}"


def test_the_helpers_of_these_tests_parse_commands_and_headings():
    assert scripts_in("python -m nas.compare x.yaml --report > out") == [
        ("nas/compare.py", ["x.yaml", "--report", ">", "out"])
    ]
    assert scripts_in("torchrun --nproc-per-node 4 -- search.py A --run B") == [("search.py", ["A", "--run", "B"])]
    assert scripts_in("retrain.py --eval-only") == [("retrain.py", ["--eval-only"])]
    assert scripts_in("pip install x") == []
    assert "--resume" in flags_of("search.py") and "--nothing" not in all_flags()
    assert anchors("## Latency: predicted against measured\n### `a.b`") == {"latency-predicted-against-measured", "ab"}
    assert "search.latency" in SECTIONS and "search.latency.target" in KEYS and "model.division" not in KEYS | SECTIONS
