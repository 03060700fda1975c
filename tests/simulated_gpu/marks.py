"""
Which device-dependent lines of the package were entered: marks that an import hook puts before them.

A line depends on the device if it names streams, events, page-locked memory, non-blocking copies, a device's type or
torch's device modules, or if it is the first of a branch that such a condition guards. Every thread counts, those of
autograd too, which no tracer of Python sees.
"""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from pathlib import Path

DEPENDS = re.compile(
    r"torch\.cuda|torch\.accelerator|get_device_module|\.beside\b|non_blocking|pin_memory|\bpin(ned)?=|wait_event|"
    r"wait_stream|record_event|record_stream|synchronize|current_stream|\.Stream\b|\.stream\(|empty_cache|mem_get_info|"
    r"\.type\b.* (==|!=|in|not in) |(==|!=) ['\"](cpu|cuda)['\"]|cudart|pynvml|on_gpu|on_device\b"
)
PACKAGE = "hf_hybrid"

known: set[str] = set()
"""Every device-dependent line of the modules imported so far, as `file: source`."""
entered: set[str] = set()
without: tuple[str, int, int] | None = None


def _header(statement: ast.stmt) -> str:
    """The source of a statement without the statements inside it."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Try)):
        return ""
    parts = {"If": ("test",), "While": ("test",), "For": ("target", "iter"), "With": ("items",)}
    names = parts.get(type(statement).__name__)
    if names is None:
        return ast.unparse(statement)
    values = [
        value
        for name in names
        for value in (getattr(statement, name) if name == "items" else [getattr(statement, name)])
    ]
    return f"{type(statement).__name__.lower()} {' '.join(ast.unparse(value) for value in values)}"


class _Marking(ast.NodeTransformer):
    def __init__(self, file: str):
        self.file, self.depth = file, 0

    def visit_FunctionDef(self, node):
        self.depth += 1
        self.generic_visit(node)
        node.body = self._marked(node.body, False)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def _block(self, node, guarded: bool = False):
        self.generic_visit(node)
        if self.depth:
            for name in ("body", "orelse", "finalbody"):
                if getattr(node, name, None):
                    setattr(node, name, self._marked(getattr(node, name), guarded))
        return node

    def visit_If(self, node):
        return self._block(node, bool(DEPENDS.search(ast.unparse(node.test))))

    visit_For = visit_While = visit_With = visit_Try = visit_ExceptHandler = _block

    def _marked(self, body: list[ast.stmt], guarded: bool) -> list[ast.stmt]:
        made = []
        for index, statement in enumerate(body):
            source = _header(statement)
            docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not docstring and source and (DEPENDS.search(source) or (guarded and index == 0)):
                key = f"{self.file}: {source}"
                known.add(key)
                call = ast.Call(ast.Name("_entered", ast.Load()), [ast.Constant(key)], [])
                made.append(ast.copy_location(ast.Expr(call), statement))
            made.append(statement)
        return made


WAITS = ("wait_event", "wait_stream", "record_stream", "synchronize")
WRAPPERS = ("wait", "finish", "finish_sending")
"""Methods of `streaming` and `phase_memory` that wait. Elsewhere such names wait for threads and processes."""


def is_wait(node: ast.AST, wrapped: bool = True) -> bool:
    """Whether a node of a syntax tree orders two streams, or a stream and the host; if `wrapped`, through another."""
    if isinstance(node, ast.keyword):
        return wrapped and node.arg == "after"
    names = WAITS + WRAPPERS if wrapped else WAITS
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


class _Without(ast.NodeTransformer):
    """Takes one wait out."""

    def __init__(self, line: int, column: int):
        self.place = line, column

    def visit_Call(self, node):
        self.generic_visit(node)
        if is_wait(node) and (node.lineno, node.col_offset) == self.place:
            return ast.copy_location(ast.Constant(None), node)
        return node

    def visit_keyword(self, node):
        self.generic_visit(node)
        if is_wait(node) and (node.lineno, node.col_offset) == self.place:
            node.value = ast.copy_location(ast.Constant(None), node.value)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data, filename=path)
        file = str(Path(path)).rsplit(f"/{PACKAGE}/", 1)[-1]
        if without is not None and without[0] == file:
            tree = _Without(*without[1:]).visit(tree)
        tree = ast.fix_missing_locations(_Marking(file).visit(tree))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname):  # never from the cache of compiled modules, nor into it
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module):
        module._entered = entered.add
        super().exec_module(module)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def mark(mutation: str | None = None) -> None:
    """Mark every module of the package that is imported from now on; `mutation` names a wait to take out."""
    global without
    if mutation is not None:
        file, line, column = mutation.split(":")
        without = file, int(line), int(column)
    sys.meta_path.insert(0, _Finder)
