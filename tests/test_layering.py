"""The order of the files: each imports only what stands before it here. Read from the source, nothing is run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = [
    "models.attention",
    "models.sparse",
    "models.softmax",
    "models.operations",
    "models.transformer_xl",
    "nas.errors",
    "nas.pattern",
    "nas.config",
    "nas.record",
    "nas.jobs",
    "nas.costs",
    "nas.derivation",
    "nas.baselines",
    "nas.comparison",
    "nas.rows",
    "nas.claims",
    "nas.figures",
    "nas.sources",
    "nas.tokenizer",
    "nas.prepare",
    "nas.ranks",
    "nas.data",
    "nas.device",
    "nas.gumbel",
    "nas.timing",
    "nas.cutoffs",
    "nas.supernet",
    "nas.checkpoint",
    "nas.evaluation",
    "nas.trainer",
    "nas.assembly",
    "nas.latency",
    "nas.compiling",
    "nas.stepping",
    "nas.searching",
    "nas.trained",
    "nas.perturbation",
    "nas.retraining",
    "nas.evolution",
    "nas.comparing",
    "nas.compare",
    "nas.report",
    "search",
    "derive",
    "retrain",
    "animate",
]
SCRIPTS = {"search", "derive", "retrain", "animate"}
WITHOUT_TORCH = {
    "errors",
    "pattern",
    "config",
    "record",
    "jobs",
    "costs",
    "derivation",
    "baselines",
    "comparison",
    "rows",
    "claims",
    "figures",
    "sources",
    "tokenizer",
    "prepare",
}


def source_of(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())


def imports_of(module: str) -> set[str]:
    found = set()
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_file_has_its_place():
    files = {f"{p.parent.name}.{p.stem}" for folder in ("models", "nas") for p in (ROOT / folder).glob("[!_]*.py")}
    files |= {p.stem for p in ROOT.glob("*.py")}
    assert files == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_a_file_imports_only_files_before_it(module):
    imported = imports_of(module)
    later = ORDER[ORDER.index(module) :]
    assert not imported & (set(later) - {module})
    assert not imported & SCRIPTS
    if module.startswith("models."):
        assert not any(name.split(".")[0] in ("nas", "omegaconf", "yaml") for name in imported)
    if module != "nas.figures":
        assert not any(name.split(".")[0] == "matplotlib" for name in imported)
    if module.removeprefix("nas.") in WITHOUT_TORCH:
        assert not any(name.split(".")[0] in ("torch", "models") for name in imported)


@pytest.mark.parametrize("module", ORDER)
def test_nothing_runs_at_import(module):
    """At the top of a file stand definitions, constants, the guard of a script, and matplotlib's backend."""
    for node in source_of(module).body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            assert ast.unparse(node) == "matplotlib.use('Agg')"
        assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try))
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
