"""The house: imports run one way, the package prints nothing, and the tests mirror it."""

import ast
import importlib.util
import re
from collections.abc import Generator
from pathlib import Path

from rig.circles import circles

TESTS = Path(__file__).parent
ROOT = Path(__file__).parent.parent
PACKAGE = TESTS.parent / "hf_hybrid"
FILES = sorted(PACKAGE.rglob("*.py"))

# Rooms (folders and loose modules) by floor. A room imports from its own floor and from those below.
FLOORS = {
    "words": {"arguments", "compat", "part", "files", "optimizers", "machine"},
    "arithmetic": {"run", "leaps", "forecast", "streaming", "phase_memory", "plan"},
    "engines": {"config", "recovery", "rows", "saving", "build", "records", "hub", "report", "export"},
    "Trainer": {"trainer", "trl", "integrations", "cli"},
    "experiments": {"experimental"},
}
# Rooms of the arithmetic floor that must not know each other.
STRANGERS = ({"leaps", "streaming"}, {"leaps", "phase_memory"}, {"forecast", "streaming"}, {"leaps", "plan"})

# Rooms that the others import inside functions alone, where an option or a call asks for them.
OPTIONAL = {"report", "export", "trl", "integrations", "cli", "forecast", "phase_memory", "rows"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def statements(tree: ast.AST) -> Generator[ast.AST]:
    """All nodes but those that are for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from statements(node)


def imported_rooms(tree: ast.AST) -> set[str]:
    """Return what a file imports, but for types, and for optional rooms that it imports inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    rooms = set()
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hf_hybrid":
            names = [node.module] if node.module != "hf_hybrid" else [f"hf_hybrid.{a.name}" for a in node.names]
            imported = {name.split(".")[1] for name in names} - {"__version__"}
            rooms |= imported - OPTIONAL if id(node) in inside else imported
    return rooms


TREES = {path: ast.parse(path.read_text()) for path in FILES}
IMPORTS = {path: imported_rooms(tree) - {room(path)} for path, tree in TREES.items() if path.name[:2] != "__"}
FLOOR_OF = {name: index for index, rooms in enumerate(FLOORS.values()) for name in rooms}


def test_every_room_stands_on_a_floor():
    assert FLOOR_OF.keys() == {room(path) for path in IMPORTS}


def test_arrows_run_one_way():
    arrows = [(path, imported) for path, rooms in IMPORTS.items() for imported in rooms]
    up = [(module_name(path), other) for path, other in arrows if FLOOR_OF[other] > FLOOR_OF[room(path)]]
    strangers = [(module_name(path), other) for path, other in arrows if {room(path), other} in STRANGERS]
    assert not up and not strangers


def test_rooms_of_a_floor_form_no_cycle():
    arrows: dict[str, set[str]] = {}
    for path, rooms in IMPORTS.items():
        arrows.setdefault(room(path), set()).update(rooms)

    def reach(start: str, seen: frozenset[str]) -> None:
        for following in arrows.get(start, ()):
            assert following not in seen, f"rooms in a cycle: {' -> '.join([*seen, following])}"
            reach(following, seen | {following})

    for name in arrows:
        reach(name, frozenset({name}))


def test_files_form_no_circle():
    assert circles() == []


def test_the_core_imports_optional_rooms_inside_functions_alone():
    core = {path: rooms for path, rooms in IMPORTS.items() if room(path) not in OPTIONAL | {"experimental"}}
    assert not [(module_name(path), rooms & OPTIONAL) for path, rooms in core.items() if rooms & OPTIONAL]


def test_one_function_finds_experiments_by_name():
    """An option asks for one, and whoever sets none never loads any (tests/experimental/test_reached.py)."""
    core = [path for path in FILES if room(path) != "experimental"]
    assert not [module_name(path) for path in core if "experimental" in IMPORTS.get(path, ())]
    named = {module_name(path): path.read_text().count("hf_hybrid.experimental") for path in core}
    assert {name: times for name, times in named.items() if times} == {"hf_hybrid.config": 1}


def test_public_things_are_documented():
    bare = [module_name(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    for path, tree in TREES.items():
        public = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
        bare += [f"{module_name(path)}.{node.name}" for node in public if not ast.get_docstring(node)]
    assert not bare


def test_whoever_loads_a_model_says_whether_its_code_may_run():
    """Without `trust_remote_code` transformers asks on standard input, and `yes |` answers."""
    silent = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                loads = node.func.attr in ("from_pretrained", "from_config")
                if loads and ast.unparse(node.func.value).startswith("Auto"):
                    named = {keyword.arg for keyword in node.keywords}  # None: a dictionary, which has it
                    if not named & {"trust_remote_code", None}:
                        silent.append(f"{module_name(path)}, line {node.lineno}")
    assert not silent


def test_commands_write_through_one_file():
    """It makes names and texts of strangers visible, which could be commands to the terminal."""
    rest = {path: path.read_text() for path in (PACKAGE / "cli").glob("*.py") if path.name != "console.py"}
    direct = re.compile(r"\bprint\(|\bstd(out|err)\.write\(|tqdm\.write\(")
    assert [path.name for path, text in rest.items() if direct.search(text)] == []


def test_one_file_deletes_and_moves_folders_of_a_run():
    """It looks for links first. An export has a folder of its own, and a sweep its trials."""
    calls = {"rmtree", "copytree", "move", "iterdir", "mkdir", "makedirs", "rename", "rmdir", "unlink", "remove"}
    # saver.py makes folders where nothing is, lock.py the one that the user named.
    known = {"manifest.py": calls - {"mkdir"}, "saver.py": {"mkdir"}, "lock.py": {"mkdir", "rmdir", "unlink"}}
    for path in (PACKAGE / "saving").glob("*.py"):
        called = [node.func for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
        found = {name.attr for name in called if isinstance(name, ast.Attribute)} & calls
        assert found <= known.get(path.name, set()), path.name
        assert path.name == "manifest.py" or "os.replace" not in map(ast.unparse, called), path.name
    owners = [module_name(path) for path, tree in TREES.items() if "rmtree" in ast.unparse(tree)]
    assert sorted(owners) == ["hf_hybrid.cli.trials", "hf_hybrid.export.exporter", "hf_hybrid.saving.manifest"]


def test_one_file_makes_locks():
    """They are the operating system's: a file in the place of a lock would outlive a process that is killed."""
    makers = [
        module_name(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("FileLock", "SoftFileLock", "flock")
    ]
    assert makers == ["hf_hybrid.saving.lock"]


def test_lazy_names_are_those_that_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    checked = next(node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: node.module for node in checked for alias in node.names}
    assert seen == ast.literal_eval(assigned["_LAZY"])
    needs_more = {n for n, module in seen.items() if module.startswith(("hf_hybrid.trl.", "hf_hybrid.integrations."))}
    assert set(ast.literal_eval(assigned["__all__"])) == set(seen) - needs_more | {"__version__"}


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


def test_what_a_script_imports_of_the_package_is_there():
    missing = []
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_hybrid"):
                module = importlib.import_module(node.module)
                names = [name.name for name in node.names if not hasattr(module, name.name)]
                names = [name for name in names if importlib.util.find_spec(f"{node.module}.{name}") is None]
                missing += [f"{path.name}: {node.module}.{name}" for name in names]
    assert not missing
