"""Counters in the branches of a module, put there in its syntax tree, and the names of these places.

The branches are the arms of `if`, `match` and `... if ... else ...`, loops, handlers of exceptions, and what
follows a statement that may leave its block. A name has the function and the branch's text, no line number,
and the errors and enum members that stand in the branch:
`core/sink/pulls.py Pulls.post: past if piece is None -> PullTrigger.POST`.
A block that always runs is a place where it has such words, and each move of a table of legal moves is one.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator

ALWAYS = "body"
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BRANCHES = (ast.If, ast.ExceptHandler, ast.match_case, *_LOOPS)


def count_branches(source: str, file: str, first: int = 0) -> tuple[ast.Module, list[str]]:
    """Return a module's tree with counters, and the names of its places, the first of number `first`.

    The tree adds 1 to an element of the list `_met_`; it calls `_value_` with a number and the value to
    return, and `_moves_` with a table of moves and the number of each.
    """
    tree, counting = ast.parse(source), _Counting(file, first)
    counting.visit(tree)
    return tree, counting.names


class _Counting(ast.NodeVisitor):
    def __init__(self, file: str, first: int) -> None:
        self.names: list[str] = []
        self._first, self._file, self._scope = first, file, list[str]()
        self._num_named: Counter[str] = Counter()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def generic_visit(self, node: ast.AST) -> None:
        # The labels come first, because they are the text without counters.
        for value, label in [(value, _label(node, field)) for field, value in ast.iter_fields(node)]:
            if label:
                value[:] = self._block(value, label)
            else:
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, ast.AST):
                        self.visit(one)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        test = ast.unparse(node.test)
        node.body = self._value(node.body, f"value if {test}")
        node.orelse = self._value(node.orelse, f"value else of if {test}")
        self.visit(node.test)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if node.value is not None and (moves := _moves(node.value)):
            numbers = [self._number(target, [" + ".join(map(ast.unparse, move.elts))]) for move in moves]
            node.value = _call("_moves_", node.value, ast.Dict([*moves], [*numbers]))
        else:
            self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def _block(self, block: list[ast.stmt], label: str) -> list[ast.stmt]:
        """Count a block, and anew behind each statement that may leave it."""
        num_docstrings = int(isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant))
        counted = block[:num_docstrings]
        for segment in _segments(block[num_docstrings:]):
            words = [word for one in segment for word in _words(one)]
            if label != ALWAYS or words:
                met = ast.Subscript(ast.Name("_met_", ast.Load()), self._number(label, words), ast.Store())
                counted.append(ast.AugAssign(met, ast.Add(), ast.Constant(1)))
            label = f"past {_header(segment[-1])}"
            for statement in segment:
                self.visit(statement)
            counted += segment
        return counted

    def _value(self, value: ast.expr, label: str) -> ast.expr:
        number = self._number(label, _words(value))
        self.visit(value)
        return _call("_value_", number, value)

    def _number(self, label: str, words: Iterable[str]) -> ast.Constant:
        """Name a place, and return its number."""
        text = " -> ".join(filter(None, (label, ", ".join(sorted({*words})))))
        name = f"{self._file} {'.'.join(self._scope) or 'module'}: {text}"
        self._num_named[name] += 1
        self.names.append(name if self._num_named[name] == 1 else f"{name} #{self._num_named[name]}")
        return ast.Constant(self._first + len(self.names) - 1)


def _label(node: ast.AST, field: str) -> str:
    """Return what a block of statements is named; "" where the field is none that is counted."""
    block = getattr(node, field)
    if field not in _BLOCKS[:3] or isinstance(node, ast.Module | ast.ClassDef):
        return ""
    if not isinstance(block, list) or not block:
        return ""
    if field == "orelse":
        is_elif = isinstance(node, ast.If) and isinstance(block[0], ast.If) and len(block) == 1
        return "" if is_elif else f"else of {_header(node)}"
    is_branch = isinstance(node, _BRANCHES) and not ast.unparse(block[0]).startswith("assert_never(")
    return _header(node) if is_branch else ALWAYS


def _header(node: ast.AST) -> str:
    """Return the first line of a statement, such as `for one in found`."""
    bare = copy.copy(node)
    for field in _BLOCKS:
        if isinstance(getattr(node, field, None), list):
            setattr(bare, field, [])
    return ast.unparse(bare).removesuffix(":")


def _segments(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the parts of a block that run whenever their first statement does."""
    segment: list[ast.stmt] = []
    for statement in block:
        segment.append(statement)
        if _may_leave(statement):
            yield segment
            segment = []
    if segment:
        yield segment


def _may_leave(node: ast.AST, in_loop: bool = False) -> bool:
    """Whether what follows a statement may not run although it did."""
    if isinstance(node, ast.Return | ast.Raise) or (
        isinstance(node, ast.Break | ast.Continue) and not in_loop
    ):
        return True
    blocks = [] if isinstance(node, _SCOPES) else [getattr(node, field, None) for field in _BLOCKS]
    inner = [one for block in blocks if isinstance(block, list) for one in block]
    return any(_may_leave(one, in_loop or isinstance(node, _LOOPS)) for one in inner)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the errors that a simple statement raises, and the enum members that it does not compare with."""
    if any(hasattr(node, field) for field in _BLOCKS) or isinstance(node, ast.Compare):
        return
    if isinstance(node, ast.Raise):
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        yield f"raise {ast.unparse(error)}" if error else "raise"
    if _is_member(node):
        yield ast.unparse(node)
    for one in ast.iter_child_nodes(node):
        yield from _words(one)


def _is_member(node: ast.AST) -> bool:
    """Whether the node is a member of an enum, such as `Code.BUSY`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.attr.isupper() and node.value.id[0].isupper() and not node.value.id.isupper()


def _moves(table: ast.expr) -> list[ast.Tuple]:
    """Return the moves of a table: a dict by them, or a set of them."""
    if isinstance(table, ast.Call) and table.args:
        table = table.args[0]
    found = table.keys if isinstance(table, ast.Dict) else table.elts if isinstance(table, ast.Set) else []
    moves = [one for one in found if isinstance(one, ast.Tuple) and all(map(_is_member, one.elts))]
    return moves if len(moves) == len(found) else []


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [*arguments], [])
