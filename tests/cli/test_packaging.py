"""What is declared for those who install the package: requirements, extras, oldest versions, Python versions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "PIL": "pillow"}
"""Distributions by the name they are imported as, where the two differ."""


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def imports_of(path: Path) -> dict[str, bool]:
    """Distributions that a file imports, and whether one is needed for the file to be imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # What a module imports inside of functions or under a condition, it can do without.
    top = {id(node) for node in tree.body}
    needed: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module]
        else:
            continue
        for module in (module.split(".")[0] for module in modules):
            if module not in sys.stdlib_module_names and module != "hf_hybrid":
                name = canonicalize_name(DISTRIBUTIONS.get(module, module))
                needed[name] = needed.get(name, False) or id(node) in top
    return needed


def jobs() -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]


def test_every_import_is_declared():
    needed = names([Requirement(line) for line in PROJECT["dependencies"]])
    optional = set().union(*map(names, EXTRAS.values()))
    # Axolotl's plugin is imported by Axolotl, which brings pydantic.
    brought = {"integrations/axolotl.py": {"axolotl", "pydantic"}}
    imported = set()
    for path in sorted((ROOT / "hf_hybrid").rglob("*.py")):
        name = path.relative_to(ROOT / "hf_hybrid").as_posix()
        for distribution, at_once in imports_of(path).items():
            imported.add(distribution)
            if distribution not in brought.get(name, set()):
                assert distribution in (needed if at_once else needed | optional), f"{name} imports {distribution}"
    assert needed - imported == set(), "declared, but imported nowhere"


def test_messages_name_extras_that_exist():
    named = {}
    for path in (ROOT / "hf_hybrid").rglob("*.py"):
        for extras in re.findall(r"hf[-_]hybrid\[([a-z,]+)\]", path.read_text(encoding="utf-8")):
            named.update(dict.fromkeys(extras.split(","), path.name))
    assert named and set(named) <= set(EXTRAS), named
    # No extra without a message that leads to it; README names `all`, and `dev` is for those who work on the package.
    assert set(EXTRAS) - set(named) == {"all", "dev"}


def requirements(extra: str) -> set[str]:
    """What an extra installs, that of the extras that it names included."""
    own = EXTRAS[extra]
    others = [requirements(name) for line in own if line.name == "hf_hybrid" for name in line.extras]
    return {str(line) for line in own if line.name != "hf_hybrid"}.union(*others)


def test_all_and_the_tests_have_every_extra():
    for name in set(EXTRAS) - {"dev"}:
        assert requirements(name) <= requirements("dev"), name
        # Where torchao is installed, each start of a command prints four lines of what of it cannot be loaded.
        assert name == "torchao" or requirements(name) <= requirements("all"), name


def oldest(name: str) -> str:
    """The oldest version of a package that may be installed."""
    declared = [*map(Requirement, PROJECT["dependencies"]), *map(Requirement, requirements("dev"))]
    requirement = next(requirement for requirement in declared if requirement.name == name)
    return next(version.version for version in requirement.specifier if version.operator == ">=")


@pytest.mark.parametrize("name", ["torch", "transformers", "accelerate"])
def test_oldest_versions_are_those_of_the_oldest_job(name):
    script = "\n".join(step.get("run", "") for step in jobs()["oldest"]["steps"])
    assert set(re.findall(rf'"{name}==([^"]*)"', script)) == {f"{oldest(name)}.*"}


def test_savings_are_tested_with_the_oldest_versions():
    script = (ROOT / ".ci" / "versions").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"(\w+)==([\d.]+)", re.search(r"^oldest=\((.*)\)", script, re.M)[1]))
    assert pinned == {name: f"{oldest(name)}.0" for name in ("transformers", "trl", "peft")}
    assert all(re.search(rf"grep -vE .*\b{name}\b", script) for name in pinned)  # no constraint says otherwise


def test_pinned_versions_are_admitted():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement in (Requirement(line) for line in lines if line and not line.startswith("#"))
    }
    declared = [*map(Requirement, PROJECT["dependencies"]), *map(Requirement, requirements("dev"))]
    for requirement in declared:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, f"{requirement} does not admit {version}"
    assert {"torch", "transformers", "accelerate"} <= set(pinned)


def test_python_versions_are_tested():
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert stated == jobs()["tests"]["strategy"]["matrix"]["python"]
