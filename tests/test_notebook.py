"""The notebook runs from top to bottom, with small sizes."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "experiments" / "notebook" / "par.ipynb"


def test_the_notebook_is_committed_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    small = {"RUNS": str(tmp_path), "MINUTES": None, "BLOCKS": 3, "D_MODEL": 16, "VOCAB_SIZE": 500, "TOKENS": 8}
    small |= {"OPTIONS": ["train.epochs=0.2", "search.vocab_size=[500]", "search.d_model=[16]"], "TARGET": 0.95}
    settings.source += "".join(f"\n{name} = {value!r}" for name, value in small.items())
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": NOTEBOOK.parent}}
    ).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/gif" in shown and "image/png" in shown and any("<iframe" in str(output) for output in outputs)
    assert len(outputs[-1]["text"]) > len("The ")
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "found against usual: " in printed and (tmp_path / "whole" / "found" / "results.yaml").exists()
