"""Files of the package that import each other in a circle. Imports inside functions count, and those for types."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_hybrid"


def imports_of(path: Path, files: dict[str, Path]) -> set[Path]:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {files.get(f"{node.module}.{name.name}", files.get(node.module)) for name in node.names}
    return imported - {None, path, PACKAGE / "__init__.py"}


def circles() -> list[list[str]]:
    """Groups of files, each of which leads to every other of its group."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths}
    files = {name.removesuffix(".__init__"): path for path, name in names.items()}
    arrows = {path: imports_of(path, files) for path in paths}

    def reached(path: Path) -> set[Path]:
        seen, ahead = set(), [path]
        while ahead:
            following = arrows[ahead.pop()] - seen
            seen |= following
            ahead += following
        return seen

    reach = {path: reached(path) for path in paths}
    groups = {tuple(p for p in paths if p in reach[path] and path in reach[p]) for path in paths if path in reach[path]}
    return [[path.relative_to(PACKAGE).as_posix() for path in group] for group in sorted(groups)]
