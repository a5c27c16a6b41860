"""Changes of logic that a Python file admits: one node of its syntax, and the text that takes its place.

Not here: which of them are tried, and by which tests (main).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
CHOSEN = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls whose loss only a reader of logs or of a terminal would see.
ASIDE = ("log", "warnings", "logging")
# Arguments that are checks of what cannot happen.
CHECKS = ("strict",)


@dataclass(frozen=True)
class Change:
    """A change of one line or more of a file.

    Attributes:
        file: below the root of the checkout.
        line: the first that changes, from 1.
        old, new: the source of the node.
        start, end: of the node in the file's text, in characters.
        names: the function and the classes that it stands in, and the functions of the file that come to call it.
    """

    file: Path
    line: int
    old: str
    new: str
    start: int
    end: int
    names: frozenset[str] = field(default=frozenset(), compare=False)

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        return f"{self.file}:{self.line}: {old}  ->  {new}"


def changes_of(root: Path, file: Path) -> list[Change]:
    """Return the changes of logic that `file`, below `root`, admits within its functions."""
    text = (root / file).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))

    def place(line: int, column: int) -> int:
        return offsets[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found, tree = [], ast.parse(text)
    names = _names(tree)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in _nodes(function):
            for new in _replacements(node):
                start, end = place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)
                found.append(Change(file, node.lineno, text[start:end], new, start, end, names[function]))
    return sorted(set(found), key=lambda change: (change.start, change.new))


def _names(tree: ast.Module) -> dict[ast.AST, frozenset[str]]:
    """Return for each function of a file its name, those of its classes, and of the functions that come to call it."""
    uses: dict[str, set[str]] = {}
    owners: dict[ast.AST, set[str]] = {}

    def walk(node: ast.AST, owner: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*owner, child.name)
                owners[child] = set(inner)
            used = child.id if isinstance(child, ast.Name) else child.attr if isinstance(child, ast.Attribute) else ""
            if used and owner:
                uses.setdefault(used, set()).update(owner)
            walk(child, inner)

    walk(tree, ())
    for known in owners.values():
        open_names = set(known)
        while open_names:
            callers = uses.get(open_names.pop(), set()) - known
            known |= callers
            open_names |= callers
    return {node: frozenset(known) for node, known in owners.items()}


def _nodes(function: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements in a function, less annotations, messages of errors and strings."""
    for name, value in ast.iter_fields(function):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
                continue
            if isinstance(node, ast.keyword) and node.arg in CHECKS:
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield node
            yield from _nodes(node)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield what may stand in the place of `node`."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in COMPARED:
            yield f"({ast.unparse(ast.Compare(left, [COMPARED[type(operator)]()], [right]))})"
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
            yield f"({ast.unparse(values[0])})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in CALCULATED and not _is_text(left, right):
            yield f"({ast.unparse(ast.BinOp(left, CALCULATED[type(operator)](), right))})"
        case ast.IfExp(_, body, other):
            yield f"({ast.unparse(body)})"
            yield f"({ast.unparse(other)})"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value) | float(value)):
            yield f"({value + 1})"
        case ast.Call(ast.Name(name), _, _) if name in CHOSEN:
            yield ast.unparse(ast.Call(ast.Name(CHOSEN[name]), node.args, node.keywords))
        case ast.Expr(ast.Call(called)) if not ast.unparse(called).startswith(ASIDE):
            yield "pass"
        case ast.Continue():
            yield "break"
        case ast.AugAssign(target, operator, value) if type(operator) in CALCULATED and not _is_text(value):
            yield ast.unparse(ast.AugAssign(target, CALCULATED[type(operator)](), value))


def _is_text(*nodes: ast.expr) -> bool:
    """Return whether one of the operands is a text, a list or a tuple, which no other operator takes."""
    kinds = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(isinstance(n, kinds) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes)
