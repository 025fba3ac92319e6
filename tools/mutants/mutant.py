"""A mutant, and what of its code is behaviour."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from tools.mutants.tree import area_of


@dataclass(frozen=True)
class Mutant:
    """A file with some lines replaced.

    Attributes:
        path: the file, relative to the tree.
        line: the first line that is replaced, counted from 1.
        before: what is replaced, whole lines.
        after: what replaces it.
        rule: what the generator calls it, or the name of a mutant made by hand.
    """

    path: str
    line: int
    before: str
    after: str
    rule: str

    @property
    def key(self) -> str:
        """Name it, the same in every run on the same file."""
        text = f"{self.path}\0{self.line}\0{self.before}\0{self.after}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def area(self) -> str:
        """Name the part of kvio that it is in."""
        return area_of(self.path)

    @property
    def last(self) -> int:
        """The last line that is replaced."""
        return self.line + max(self.before.count("\n") - 1, 0)

    def apply(self, text: str) -> str:
        """Return the file's text with the change."""
        lines = text.splitlines(keepends=True)
        old = "".join(lines[self.line - 1 : self.last])
        assert old == self.before, f"{self.path}:{self.line} has changed"
        return "".join([*lines[: self.line - 1], self.after, *lines[self.last :]])


class _Plain(ast.NodeTransformer):
    """Leaves out what is no behaviour: annotations, docstrings, the wording of messages."""

    def visit(self, node: ast.AST) -> Any:
        """Transform *node* and what is in it."""
        self.generic_visit(node)
        match node:
            case ast.ClassDef(bases=[ast.Name(id="Protocol"), *_]):
                node.body = [ast.Pass()]
            case ast.FunctionDef(decorator_list=[ast.Name(id="overload"), *_]):
                return ast.Pass()
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
            case ast.AnnAssign():
                if "TypeAlias" in ast.dump(node.annotation):
                    return ast.Pass()
                node.annotation = ast.Constant(0)
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return ast.Pass()
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return ast.Pass()
            case ast.Raise(exc=ast.Call(args=[ast.Constant() | ast.JoinedStr(), *rest]) as call):
                call.args = [ast.Constant("message"), *rest]
            case ast.Constant(value=str() as text) if _PROSE.search(text):
                return ast.Constant("words")
            case ast.Expr(value=ast.Constant()):
                return ast.Pass()  # a docstring, or one of an attribute
            case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
                return value
        return node


_PROSE: Final = re.compile(r"[a-z]{2} |[a-z ] [a-z]")


def plain(text: str, *, exports: bool = False) -> str | None:
    """Return Python code without what is no behaviour; None if it does not compile.

    Args:
        text: the code.
        exports: what it imports and does not use is used by others.
    """
    try:
        tree = ast.parse(text)
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    tree = _Plain().visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not exports:
            names = [(alias.asname or alias.name).split(".")[0] for alias in node.names]
            node.names = [
                alias for name, alias in zip(names, node.names, strict=True) if name in used
            ]
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                kept = [each for each in block if not _is_nothing(each)]
                setattr(node, field, kept or (block and [ast.Pass()]))
    return _instructions(compile(ast.fix_missing_locations(tree), "mutant", "exec"))


def _is_nothing(statement: ast.stmt) -> bool:
    unused = isinstance(statement, ast.Import | ast.ImportFrom) and not statement.names
    return unused or isinstance(statement, ast.Pass)


def _instructions(code: CodeType) -> str:
    """Return all that is executed, without the lines it comes from."""
    inner = [
        _instructions(each) if isinstance(each, CodeType) else f"{type(each).__name__} {each!r}"
        for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return repr((code.co_name, code.co_code, code.co_exceptiontable, names, counts, inner))
