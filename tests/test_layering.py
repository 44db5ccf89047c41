"""The order of the packages: one imports only from itself and from earlier ones."""

import ast
from pathlib import Path

import pytest

from tests.processes import ROOT

PACKAGES = (
    "models",
    "nas.core",
    "nas.data",
    "nas.mixture",
    "nas.training",
    "nas.costs",
    "nas.jobs",
    "nas.retraining",
    "nas.gumbel",
    "nas.search",
    "nas.derivation",
    "nas.comparison",
    "nas.reporting",
    "nas.inference",
    "nas",
    "scripts",
)
WITHOUT_TORCH = (  # packages and files that --help and error messages import
    "models.operations.registry",
    "nas.core",
    "nas.data.optimal_cutoffs",
    "nas.data.corpus",
    "nas.data.sources",
    "nas.data.vocabulary",
    "nas.costs.budget",
    "nas.costs.cost_table",
    "nas.costs.baselines",
    "nas.derivation.runs",
    "nas.search.space",
    "nas.comparison.results",
    "nas.comparison.spec",
    "nas.jobs",
    "nas.reporting",
)
FILES = sorted([*ROOT.glob("models/**/*.py"), *ROOT.glob("nas/**/*.py"), *ROOT.glob("*.py")])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def package_of(module: str) -> str:
    return "models" if module.startswith("models.") else module.rpartition(".")[0] or "scripts"


MODULES = {module_of(path): path for path in FILES if path.stem != "__init__"}


def imports_of(module: str) -> set[str]:
    """Every module that a file imports, at any place in the file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {node.module}
    return found


def test_every_file_belongs_to_a_package():
    packages = [package_of(module) for module in MODULES]
    assert set(packages) == set(PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_only_from_its_package_and_earlier_ones(module):
    imported = imports_of(module)
    own = PACKAGES.index(package_of(module))
    for other in imported & MODULES.keys():
        earlier = PACKAGES.index(package_of(other)) < own
        same = package_of(other) == package_of(module) and package_of(module) not in ("nas", "scripts")
        assert earlier or same, f"{module} must not import {other}"
    packages = {name.split(".")[0] for name in imported}
    if module.startswith("models."):
        assert not packages & {"nas", "yaml"}
    if not module.startswith("nas.reporting."):
        assert "matplotlib" not in packages
    if module.startswith(WITHOUT_TORCH):
        assert "torch" not in packages
        assert all(other.startswith(WITHOUT_TORCH) for other in imported & MODULES.keys())


def test_files_of_a_package_import_each_other_in_one_direction():
    waiting = {
        module: {other for other in imports_of(module) & MODULES.keys() if other != module} for module in MODULES
    }
    while ready := [module for module, others in waiting.items() if not others & waiting.keys()]:
        for module in ready:
            del waiting[module]
    assert not waiting, "these import each other in a circle"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_runs_at_import(module):
    """The top level of a file has only definitions, constants, the guard of a script, and matplotlib's backend."""
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            assert ast.unparse(node) == "matplotlib.use('Agg')"
        assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try))
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'"
