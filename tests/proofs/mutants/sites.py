"""The places of a module that a careless refactoring would break, found in its syntax tree.

Each operator is one kind of carelessness: a function of a node that yields the changes of source text there.
The text is changed by the positions of nodes, so that a diff shows no more than the change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

Members = Mapping[str, Sequence[str]]  # of each enum
Node = ast.expr | ast.stmt


class Site(NamedTuple):
    """One change: the bytes from `start` to `end` are replaced by `new`."""

    operator: str
    line: int
    start: int
    end: int
    new: bytes


class _Variable(NamedTuple):
    """A parameter or local, bound from below the line `after` to the line `until`.

    kind: its annotation, or the last of its name's words; "" where it has neither.
    """

    kind: str
    after: int
    until: int


class _Scope(NamedTuple):
    """The function around a node. `fields`: the annotations of those of `self`."""

    makes_fields: bool  # one that it reads may not be there yet
    variables: dict[str, _Variable]
    fields: dict[str, str]


# A statement with one of these words, or a function of these names, only logs, counts or shows.
_SHOWN = re.compile(
    r"\b_?(operator_)?log(ger)?\.\w+\(|phases_s|failed_phase|\.silent\b|hidden_bytes|whole_at|predicted_s|metrics"
    r"|traceparent|sampled_trace|EmitRecord|emit_record|CountServed|count_busy_refusal|BUSY_REFUSALS|TYPE_CHECKING",
    re.IGNORECASE,
)
_SHOWS = re.compile(r"__repr__|__str__|check_integrity|status|describe_\w+|\w*snapshot\w*")
_MAKES_FIELDS = ("__init__", "__post_init__", "_open")
_UPDATES = re.compile(r"add|append(left)?|clear|discard|extend|insert|pop(item|left)?|put|remove|update")
_HAS_NO_EFFECT = re.compile(
    r"all|any|bool|dict|enumerate|float|frozenset|get|int|isinstance|items|keys|len|list|map|max|min|next|range"
    r"|reversed|set|sorted|str|sum|tuple|values|zip|[A-Z].*"  # a class makes an object
)
_BOUNDARIES = {ast.Lt: (b"<", b"<="), ast.LtE: (b"<=", b"<"), ast.Gt: (b">", b">="), ast.GtE: (b">=", b">")}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LEAVES = (ast.Constant, ast.expr_context, ast.operator, ast.boolop, ast.cmpop, ast.unaryop)
_LEFT_OUT = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Pass)
_LOOSE = (ast.BoolOp, ast.IfExp, ast.Lambda)  # an operand of these kinds needs parentheses


class Module:
    """A module's text, and the sites in it."""

    def __init__(self, source: str, members: Members) -> None:
        self.members = members
        self.sites: list[Site] = []
        self._text = source.encode()
        self._lines = [0, *accumulate(map(len, self._text.splitlines(keepends=True)))]
        self._visit(ast.parse(source), None, {})

    def span(self, first: Node, last: Node | None = None) -> tuple[int, int]:
        """Return where the source of a node begins and ends, or that from one node to another."""
        last = last or first
        start = self._lines[first.lineno - 1] + first.col_offset
        return start, self._lines[last.end_lineno - 1] + last.end_col_offset

    def text(self, first: Node, last: Node | None = None) -> bytes:
        """Return the source of a node, or that from one node to another."""
        start, end = self.span(first, last)
        return self._text[start:end]

    def replace(self, node: Node, new: str | bytes) -> tuple[int, int, int, bytes]:
        """Return the change that puts a text in place of a node."""
        return node.lineno, *self.span(node), new.encode() if isinstance(new, str) else new

    def is_left_out(self, node: ast.AST) -> bool:
        """Whether the node decides nothing."""
        if isinstance(node, _DEFINITIONS):
            return bool(_SHOWS.fullmatch(node.name))
        is_simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        shown = node if is_simple else node.test if isinstance(node, ast.If) else None
        return isinstance(node, _LEFT_OUT) or bool(shown and _SHOWN.search(self.text(shown).decode()))

    def _visit(self, node: ast.AST, scope: _Scope | None, fields: dict[str, str]) -> None:
        if self.is_left_out(node):
            return
        if isinstance(node, ast.ClassDef):
            fields, scope = _fields(node), None
        elif isinstance(node, _DEFINITIONS):
            scope = _Scope(node.name in _MAKES_FIELDS, dict(_variables(node)), fields)
        for name, operator in OPERATORS.items() if scope else [("wrong-member", _wrong_member)]:
            self.sites += (Site(name, *change) for change in operator(self, node, scope))
        is_declared = isinstance(node, (ast.AnnAssign, *_DEFINITIONS))
        for name, value in ast.iter_fields(node):
            if is_declared and name not in ("body", "value"):
                continue
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, _LEAVES):
                    self._visit(child, scope, fields)


Changes = Iterator[tuple[int, int, int, bytes]]  # each a Site without its operator


# --- what is known of names


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """Return the annotation of each field, by the class's body or by what `__init__` assigns."""
    inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    parameters = dict(chain.from_iterable(map(_variables, inits)))
    found = {}
    for one in (*node.body, *chain.from_iterable(init.body for init in inits)):
        if isinstance(one, ast.AnnAssign):
            found[ast.unparse(one.target).removeprefix("self.")] = ast.unparse(one.annotation)
        elif isinstance(one, ast.Assign) and (given := parameters.get(ast.unparse(one.value))):
            found[ast.unparse(one.targets[0]).removeprefix("self.")] = given.kind
    return found


def _variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, _Variable]]:
    """Yield the locals of a function, the first assignment last, and its parameters."""
    for block in reversed([*chain.from_iterable(map(_blocks, _walk(function)))]):
        for one in reversed(block):
            is_compound = hasattr(one, "body")
            after = one.lineno if is_compound else one.end_lineno
            bound = getattr(one, "target", None) if is_compound else one
            annotation = ast.unparse(one.annotation) if isinstance(one, ast.AnnAssign) else ""
            for name in _names(bound, ast.Store) if bound else ():
                kind = annotation or "".join(name.rpartition("_")[1:] if "_" in name else ())
                yield name, _Variable(kind, after, block[-1].end_lineno)
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if argument.annotation is not None:
            yield argument.arg, _Variable(ast.unparse(argument.annotation), 0, function.end_lineno)


@cache
def _walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and what is below it, without definitions inside."""
    children = [one for one in ast.iter_child_nodes(node) if not isinstance(one, _DEFINITIONS)]
    return node, *chain.from_iterable(map(_walk, children))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in _walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def _attributes(node: ast.AST, *contexts: type[ast.expr_context]) -> set[str]:
    return {
        one.attr for one in _walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, contexts)
    }


def _base(node: ast.AST, context: type[ast.expr_context]) -> str:
    """Return x of `x.y`; "" of all else."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) and isinstance(node.value, ast.Name):
        return node.value.id
    return ""


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(one, kinds) for one in _walk(node))


def _next(names: Sequence[str], present: str) -> str:
    return names[(names.index(present) + 1) % len(names)]


# --- the operators


def _dropped(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """A call, a deletion or an early exit is lost."""
    value = node.value if isinstance(node, ast.Expr) else None
    call = value.value if isinstance(value, ast.Await) else value
    is_call = isinstance(call, ast.Call) and not _is_update(node) and not scope.makes_fields
    if isinstance(node, ast.stmt) and (is_call or isinstance(node, ast.Delete) or _is_guard(node)):
        yield module.replace(node, "pass")


def _is_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], _JUMPS)


def _is_update(node: ast.AST) -> bool:
    """Whether a statement only changes an object that others hold."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Attribute) and bool(_UPDATES.fullmatch(node.value.func.attr))
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or node.value is None:
        return False
    return not _names(node, ast.Store) and _has(node, ast.Attribute, ast.Subscript)


def _lost_update(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """A field or a table keeps what it had."""
    if isinstance(node, ast.stmt) and _is_update(node) and not scope.makes_fields:
        yield module.replace(node, "pass")


def _moved(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """Two neighbours of a block change places."""
    for first, second in chain.from_iterable(map(pairwise, _blocks(node))):
        if not any(map(module.is_left_out, (first, second))) and _depend(first, second):
            texts = module.text(first), module.text(second)
            between = module.text(first, second)[len(texts[0]) : -len(texts[1])]
            yield first.lineno, *module.span(first, second), texts[1] + between + texts[0]


def _depend(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether the order of two statements can matter, and the other can be run."""
    if any(isinstance(one, (*_JUMPS, *_DEFINITIONS)) for one in (first, second)):
        return False
    if _names(first, ast.Store) & _names(second, ast.Load):
        return False
    calls, then_calls = _calls(first), _calls(second)
    if calls and then_calls:
        return calls != then_calls
    writes, then_writes = _attributes(first, ast.Store), _attributes(second, ast.Store)
    if writes & _attributes(second, ast.Load, ast.Store) or then_writes & _attributes(first, ast.Load):
        return True
    acts = calls or writes or _has(first, ast.Subscript)
    then_acts = then_calls or then_writes or _has(second, ast.Subscript)
    has_jump = _has(first, *_JUMPS) or _has(second, *_JUMPS)
    return bool(acts and then_acts and (calls or then_calls or has_jump))


def _calls(node: ast.AST) -> set[str]:
    """Return what a statement calls that may have an effect."""
    found = {ast.unparse(one.func) for one in _walk(node) if isinstance(one, ast.Call)}
    return {
        name
        for name in found
        if not name.startswith("np.") and not _HAS_NO_EFFECT.fullmatch(name.rpartition(".")[2])
    }


def _wrong_variable(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """Another variable, or another field of `self`, of the same type."""
    name, of, kinds = "", "", {}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        bound = scope.variables.items()
        name, kinds = node.id, {name: one.kind for name, one in bound if one.after < node.lineno <= one.until}
    elif isinstance(node, ast.Attribute) and _base(node, ast.Load) == "self" and not scope.makes_fields:
        name, of, kinds = node.attr, "self.", scope.fields
    same = sorted(other for other, kind in kinds.items() if kind and kind == kinds.get(name))
    if isinstance(node, ast.expr) and len(same) > 1:
        yield module.replace(node, of + _next(same, name))


def _missing_check(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """A condition loses a part, its `not`, or all effect."""
    if isinstance(node, ast.BoolOp) and not _has(node, ast.NamedExpr):
        word = b" and " if isinstance(node.op, ast.And) else b" or "
        shapes = [b"(%b)" if isinstance(one, _LOOSE) else b"%b" for one in node.values]
        texts = [shape % module.text(one) for shape, one in zip(shapes, node.values, strict=True)]
        for index in range(len(texts)):
            yield module.replace(node, word.join(texts[:index] + texts[index + 1 :]))
    elif isinstance(node, (ast.If, ast.IfExp)) and not _has(node.test, ast.NamedExpr) and not _is_guard(node):
        yield module.replace(node.test, "True")
        yield module.replace(node.test, "False")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield module.replace(node, module.text(node).removeprefix(b"not").lstrip())
    yield from _compared(module, node, {ast.NotIn: (b"not in", b"in")})


def _boundary(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """A comparison, a count or an index is off by one; the least is taken for the most."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield module.replace(node, re.sub(rb"\s*[+-]\s*1$", b"", module.text(node)))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield module.replace(node.func, "max" if node.func.id == "min" else "min")
    elif isinstance(node, ast.Subscript) and (index := ast.unparse(node.slice)) in ("0", "-1"):
        yield module.replace(node.slice, "-1" if index == "0" else "0")
    yield from _compared(module, node, _BOUNDARIES)


def _compared(module: Module, node: ast.AST, table: Mapping[type[ast.cmpop], tuple[bytes, bytes]]) -> Changes:
    """Yield another comparison for each that the table has."""
    if isinstance(node, ast.Compare):
        for (left, right), op in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            if type(op) in table:
                start, end = module.span(left)[1], module.span(right)[0]
                between = module.text(left, right)[len(module.text(left)) : -len(module.text(right))]
                yield left.end_lineno, start, end, between.replace(*table[type(op)], 1)


def _stale(module: Module, node: ast.AST, scope: _Scope) -> Changes:
    """A field is read before the statement that changes it, and used after."""
    for block in () if scope.makes_fields else _blocks(node):
        for index, update in enumerate(block):
            updated = {ast.unparse(one) for one in _walk(update) if _base(one, ast.Store)}
            followers = block[index + 1 :] if updated and not module.is_left_out(update) else []
            reads = [one for later in followers if not module.is_left_out(later) for one in _walk(later)]
            bound = {name for one in (update, *followers) for name in _names(one, ast.Store)}
            for read in (one for one in reads if isinstance(one, ast.Attribute)):
                value = module.text(read)
                if _base(read, ast.Load) not in {"", *bound} and value.decode() in updated:
                    first = b"earlier = %b\n%b" % (value, b" " * update.col_offset)
                    then = module.text(update, read).removesuffix(value) + b"earlier"
                    yield read.lineno, *module.span(update, read), first + then


def _wrong_member(module: Module, node: ast.AST, scope: _Scope | None) -> Changes:
    """The next member of the same enum."""
    enum = _base(node, ast.Load)
    if isinstance(node, ast.Attribute) and node.attr in module.members.get(enum, ()):
        yield module.replace(node, f"{enum}.{_next(module.members[enum], node.attr)}")


OPERATORS = {
    "dropped": _dropped,
    "moved": _moved,
    "wrong-variable": _wrong_variable,
    "missing-check": _missing_check,
    "boundary": _boundary,
    "lost-update": _lost_update,
    "stale": _stale,
    "wrong-member": _wrong_member,
}
