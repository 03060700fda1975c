"""The house: imports run one way, the package prints nothing, and the tests mirror it."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = Path(__file__).parent.parent
PACKAGE = TESTS.parent / "hf_hybrid"
FILES = sorted(PACKAGE.rglob("*.py"))

# Rooms (folders and loose modules) by floor. A room imports from its own floor and from those below.
FLOORS = {
    "words": {"arguments", "compat", "part", "files", "optimizers", "machine"},
    "arithmetic": {"run", "leaps", "world_model", "streaming", "phase_memory", "plan"},
    "engines": {
        "config",
        "recovery",
        "rows",
        "saving",
        "setup",
        "records",
        "hub",
        "report",
        "export",
    },
    "Trainer": {"trainer", "integrations", "cli"},
}
# Rooms of the arithmetic floor that must not know each other.
STRANGERS = ({"leaps", "streaming"}, {"leaps", "phase_memory"}, {"world_model", "streaming"}, {"leaps", "plan"})

# Rooms that can be deleted: the core works without them (tests/test_core_alone.py), and loads them if an option asks.
OPTIONAL = {"report", "export", "integrations", "cli", "world_model", "phase_memory", "rows"}


def room(name: str) -> str:
    return name.removeprefix("hf_hybrid.").split(".")[0]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def statements(tree: ast.AST):
    """All nodes but those that are for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from statements(node)


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hf_hybrid":
            names = [node.module] if node.module != "hf_hybrid" else [f"hf_hybrid.{a.name}" for a in node.names]
            found |= {room(name) for name in names}
    return found - {"__version__"}


def floor(name: str) -> int:
    found = [index for index, rooms in enumerate(FLOORS.values()) if name in rooms]
    assert found, f"`{name}` stands on no floor: add it to FLOORS"
    return found[0]


@pytest.mark.parametrize("path", [p for p in FILES if not p.name.startswith("__")], ids=module_name)
def test_arrows_run_one_way(path):
    own = room(module_name(path))
    for imported in imported_rooms(path) - {own}:
        assert floor(imported) <= floor(own), f"`{module_name(path)}` imports `{imported}`, which stands above it"
        assert {own, imported} not in STRANGERS, f"`{module_name(path)}` imports `{imported}`: they are strangers"


def test_rooms_of_a_floor_form_no_cycle():
    arrows: dict[str, set[str]] = {}
    for path in FILES:
        if not path.name.startswith("__"):
            own = room(module_name(path))
            arrows.setdefault(own, set()).update(imported_rooms(path) - {own})

    def reach(start: str, seen: frozenset[str]) -> None:
        for following in arrows.get(start, ()):
            assert following not in seen, f"rooms in a cycle: {' -> '.join([*seen, following])}"
            reach(following, seen | {following})

    for name in arrows:
        reach(name, frozenset({name}))


@pytest.mark.parametrize("path", [p for p in FILES if not p.name.startswith("__")], ids=module_name)
def test_the_core_never_imports_optional_rooms(path):
    if room(module_name(path)) not in OPTIONAL:
        assert not imported_rooms(path) & OPTIONAL, "load it with `load_room` where an option asks for it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_public_things_are_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "every module says what it is for"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"`{node.name}` has no docstring"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_whoever_loads_a_model_says_whether_its_code_may_run(path):
    """Without `trust_remote_code` transformers asks on standard input, and `yes |` answers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if owner.startswith("Auto") and node.func.attr in ("from_pretrained", "from_config"):
                named = {keyword.arg for keyword in node.keywords}  # None: a dictionary, which has it
                assert named & {"trust_remote_code", None}, f"{module_name(path)}, line {node.lineno}"


def test_lazy_names_are_those_that_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    checked = next(node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: node.module for node in checked for alias in node.names}
    assert seen == ast.literal_eval(assigned["_LAZY"])
    needs_trl = {name for name, module in seen.items() if module.startswith("hf_hybrid.integrations.")}
    assert set(ast.literal_eval(assigned["__all__"])) == set(seen) - needs_trl | {"__version__"}


def test_few_modules_lie_loose():
    assert len(list(PACKAGE.glob("*.py"))) <= 12


# The tests.


def test_files_of_tests_say_what_they_are_about():
    silent = [path.name for path in TESTS.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_tests_mirror_the_package():
    for path in PACKAGE.iterdir():
        if (path / "__init__.py").is_file():
            assert list((TESTS / path.name).glob("test_*.py")), f"`{path.name}/` has no tests in `tests/{path.name}/`"
        elif path.suffix == ".py" and not path.name.startswith("__"):
            assert (TESTS / f"test_{path.name}").is_file(), f"`{path.name}` has no `tests/test_{path.name}`"


def test_the_rig_lists_its_files():
    listed = re.findall(r"^\| `(\w+\.py)`", (TESTS / "rig" / "__init__.py").read_text(), flags=re.M)
    assert listed == sorted(path.name for path in (TESTS / "rig").glob("[!_]*.py"))


@pytest.mark.parametrize(
    "path", [p for f in ("benchmarks", "examples") for p in sorted((ROOT / f).rglob("*.py"))], ids=str
)
def test_what_a_script_imports_of_the_package_is_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_hybrid"):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            missing = [name for name in missing if importlib.util.find_spec(f"{node.module}.{name}") is None]
            assert not missing, f"`{node.module}` has no {missing}"
