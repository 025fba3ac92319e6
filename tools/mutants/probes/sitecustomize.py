"""Mark every statement of kvio that is executed, in a map which all child processes share.

A recording run has this directory in PYTHONPATH. Each statement of a function is compiled with a
store into mapped memory before it, so that nothing is lost with a child that is killed.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any, Final

NAME: Final = "__kvio_reached__"


class Probes(ast.NodeTransformer):
    """Put a probe before every statement of every function."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.depth = 0

    def visit(self, node: ast.AST) -> Any:
        """Transform *node* and what is in it."""
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self.depth += function
        self.generic_visit(node)
        if self.depth:
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list) and not isinstance(node, ast.ClassDef):
                    setattr(node, field, self._probed(statements, function))
        self.depth -= function
        return node

    def _probed(self, statements: list[ast.stmt], function: bool) -> list[ast.stmt]:  # noqa: FBT001
        probed: list[ast.stmt] = []
        for number, statement in enumerate(statements):
            docstring = function and not number and _is_text(statement)
            if not docstring:
                probe = ast.parse(f"{NAME}[{self.base + statement.lineno}] = 1").body[0]
                for part in ast.walk(probe):
                    ast.copy_location(part, statement)
                probed.append(probe)
            probed.append(statement)
        return probed


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _install(prefix: str) -> None:
    index = json.loads(Path(f"{prefix}.index").read_text())
    with open(f"{prefix}.map", "r+b") as file:
        setattr(builtins, NAME, mmap.mmap(file.fileno(), 0))
    root, bases = index["root"], index["bases"]
    plain = importlib.machinery.SourceFileLoader.source_to_code

    def probed(self: Any, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        base = bases.get(os.path.relpath(os.fsdecode(path), root))
        if base is None:
            return plain(self, data, path, _optimize=_optimize)
        tree = Probes(base).visit(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    importlib.machinery.SourceFileLoader.source_to_code = probed  # type: ignore[method-assign]
    sys.pycache_prefix = f"{prefix}.pyc"


if prefix := os.environ.get("KVIO_PROBES"):
    _install(prefix)
