"""The HTML page is complete and escaped, and needs no network and no scripts."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from nas.core.config import flat_config
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.reporting.page import changed_options, write_page
from tests.processes import refuse, succeed

pytestmark = pytest.mark.slow

EVIL = "<script>alert('x')&\"quoted\""  # a valid name of a file


@pytest.fixture(scope="module")
def runs(tmp_path_factory, finished_comparison, searched, small_yaml) -> dict[str, Path]:
    """A search with its pattern, a comparison, and one of its trainings. A name of the comparison has HTML in it."""
    folder = tmp_path_factory.mktemp("runs <b>")  # a valid name of a folder
    search = shutil.copytree(searched, folder / "search")
    succeed("latency", small_yaml, "--out", search / "latency.yaml")
    succeed("derive", search)
    comparison = shutil.copytree(finished_comparison[1], folder / "comparison")
    settings = yaml.safe_load((comparison / "comparison.yaml").read_text())
    settings["patterns"] = {EVIL if name == "wide" else name: key for name, key in settings["patterns"].items()}
    write_yaml(comparison / "comparison.yaml", settings)
    return {"search": search, "retrain": comparison / "runs" / "16-ada-1", "compare": comparison}


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    output = succeed("report", *runs.values(), "--out", out, "--title", EVIL)
    assert output.startswith(f"written to {out}")
    return out


class Reader(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_the_page_loads_nothing_runs_nothing_and_escapes_names(page):
    tags = Reader(page.read_text()).tags
    assert not {"script", "link", "iframe", "object", "embed", "video"} & {tag for tag, _ in tags}
    sources = [attributes["src"] for _, attributes in tags if "src" in attributes]
    assert len(sources) >= 5 and all(source.startswith("data:image/") for source in sources)
    assert all(attributes.get("href", "#").startswith("#") for _, attributes in tags)
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert "url(" not in page.read_text() and "@import" not in page.read_text()
    (policy,) = (a["content"] for t, a in tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert all(attributes["alt"] for tag, attributes in tags if tag == "img")
    text = Reader(page.read_text()).text
    assert text.count(EVIL) >= 4 and "runs <b>" in text  # names are escaped: title, heading, claim, table
    assert "<script" not in page.read_text() and "<b>" not in page.read_text()


def test_the_page_has_the_pictures_claims_and_figures_of_the_runs(page, runs):
    text = page.read_text()
    assert text.count("data:image/gif;base64,R0lGODlh") == 1
    assert text.count("data:image/svg+xml;base64,") >= 4
    badges = re.findall(r'class="verdict (\w+)">([^<]+)<', text)
    verdicts = {("better", "better"), ("worse", "worse"), ("no", "no worse"), ("not", "not shown")}
    assert badges and set(badges) <= verdicts
    words = Reader(text).text
    assert words.index("hardly trained: ") < words.index("no worse: the interval") < words.index(f"{EVIL}: ")
    for heading in ("Comparison: ", "Search: ", "Training: ", "Confidence of each block", "Cost of each operation"):
        assert heading in words
    results = yaml.safe_load((runs["retrain"] / "results.yaml").read_text())
    assert f"{results['test']['word_perplexity']:.2f}" in words and f"{results['parameters']:,}" in words
    for run in ("search", "retrain"):
        record = yaml.safe_load((runs[run] / "provenance.yaml").read_text())
        command, _, options = record["command"].partition(" --run ")
        assert f"python {' '.join([command, '--run NEW_FOLDER', *options.split()[1:]])}" in words
        assert all(digest in words for digest in record["data_sha256"].values())
    confidence = yaml.safe_load((runs["search"] / "pattern.yaml").read_text())["confidence"]
    assert all(f"{block['margin']:.3f}" in words for block in confidence)
    assert "train.steps8" in words  # an option and its value, in neighbouring cells
    assert text.count("<table") == text.count('<div class="wide"><table') > 3  # a wide table scrolls in its box


def test_only_options_that_somebody_set_are_listed(small_yaml):
    def listed(*overrides):
        return changed_options(flat_config(load_config(small_yaml, list(overrides))))

    shown = listed("train.epochs=2")
    assert shown["train.epochs"] == 2 and shown["train.segment"] == 8 and shown["model.d_model"] == 16
    assert not {"train.steps", "search.optimizer.lr"} & shown.keys()
    assert listed("search.optimizer.lr=0.3")["search.optimizer.lr"] == 0.3


def test_a_folder_without_a_run_is_refused_and_nothing_is_written(tmp_path, runs):
    with pytest.raises(InputError, match="is not a run folder: give the --run folder of"):
        write_page([runs["search"], tmp_path], tmp_path / "out.html", "")
    assert not (tmp_path / "out.html").exists()
    assert refuse("report", tmp_path, "--out", "page.pdf") == "error: --out page.pdf must end in .html"
