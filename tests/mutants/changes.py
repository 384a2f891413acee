"""What can be changed in a piece of code, so that it means something else."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator

_COMPARED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
_COMPUTED = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Mod: ast.Mult},
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
# Of these, arguments that change places change nothing, or give what no test need find: a TypeError.
_NOT_SWAPPED = {*_CALLED, "maximum", "minimum", "isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast"}
_KEPT_KEYWORDS = {"strict", "stacklevel"}  # what only the callers of a defect would see
_TYPE_NAME = re.compile(r"_?[A-Z][a-z]\w*")

Change = tuple["ast.expr | ast.stmt", str, str]  # what changes, what sort of change it is, and the code instead


def changes(node: ast.AST, *, inside: bool = False) -> Iterator[Change]:
    """The changes of ``node`` and of all in it; ``inside`` a function or class."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Raise() | ast.JoinedStr() | ast.Global() | ast.Nonlocal():
            return
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.FunctionDef():
            yield from _all([*node.args.defaults, *node.args.kw_defaults, *node.body], inside=True)
        case ast.ClassDef():
            yield from _all(node.body, inside=True)
        case ast.AnnAssign():
            yield from _all([node.value], inside=inside)
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if not inside and _TYPE_NAME.fullmatch(name):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=ast.Name(id="cast"), args=[_, held]):
            yield from changes(held, inside=inside)
        case _:
            yield from _own(node, inside=inside)
            yield from _all(ast.iter_child_nodes(node), inside=inside)


def _all(nodes: Iterable[ast.AST | None], *, inside: bool) -> Iterator[Change]:
    for node in nodes:
        if node is not None:
            yield from changes(node, inside=inside)


def _own(node: ast.AST, *, inside: bool) -> Iterator[Change]:
    """Those of ``node`` itself."""
    match node:
        case ast.If() | ast.IfExp() if not _names(node.test):
            yield from ((node.test, f"if {value}", value) for value in ("True", "False"))
        case ast.While() if not _names(node.test):
            yield node.test, "while", "False"
        case ast.comprehension():
            yield from ((test, "filter", "True") for test in node.ifs if not _names(test))
            yield from _members(node.iter)
        case ast.For():
            yield from _members(node.iter)
        case ast.Assign() if not inside:
            yield from _members(node.value)
        case ast.Set():
            yield from _members(node)
        case ast.Compare():
            for place, op in enumerate(node.ops):
                ops = [*node.ops[:place], _COMPARED[type(op)](), *node.ops[place + 1 :]]
                yield _replaced(node, "comparison", ops=ops)
            yield from _members(node.comparators[-1]) if isinstance(node.ops[-1], (ast.In, ast.NotIn)) else ()
        case ast.BoolOp():
            yield _replaced(node, "boolean", op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, "sign", f"({ast.unparse(node.operand)})"
        case ast.BinOp() if type(node.op) in _COMPUTED and not _is_text(node.left) and not _is_text(node.right):
            yield _replaced(node, "arithmetic", op=_COMPUTED[type(node.op)]())
        case ast.Constant(value=bool() | int() | float()):
            yield node, "constant", _other(node.value)
        case ast.Call():
            yield from _of_call(node)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "statement", "pass"
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) not in ("None", "True", "False"):
            yield node, "return", "return None"


def _of_call(node: ast.Call) -> Iterator[Change]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _CALLED:
        head = ast.unparse(node.func).removesuffix(name)
        yield node.func, "name", head + _CALLED[name]
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in _KEPT_KEYWORDS:
            yield _replaced(node, "keyword", keywords=[*node.keywords[:place], *node.keywords[place + 1 :]])
    if name not in _NOT_SWAPPED and len(node.args) > 1:
        first, second, *rest = node.args
        is_plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
        if is_plain and ast.dump(first) != ast.dump(second):
            yield _replaced(node, "order", args=[second, first, *rest])


def _members(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, (ast.Set, ast.Tuple, ast.List)) and len(node.elts) > 1:
        for place in range(len(node.elts)):
            yield _replaced(node, "member", elts=[*node.elts[:place], *node.elts[place + 1 :]])


def _replaced(node: ast.expr, kind: str, **fields: object) -> Change:
    changed = copy.copy(node)
    for name, held in fields.items():
        setattr(changed, name, held)
    return node, kind, f"({ast.unparse(changed)})"


def _names(node: ast.expr) -> bool:
    """Whether it gives a value a name."""
    return any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _other(number: bool | int | float) -> str:
    if isinstance(number, bool):
        return str(not number)
    return "0" if number == 1 else repr(number + 1)
