"""Generates the mutants for `tools/mutate.py`: one change of a module's syntax tree each.

Documentation, annotations, error messages and imports are not mutated.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = ("annotation", "returns", "type_params", "bases")


@dataclass(frozen=True)
class Mutant:
    """One fault: the index of its site (`place`, see `sites`) and of its replacement."""

    path: str
    place: int
    choice: int
    line: int
    last_line: int
    function: str  # the outermost one with its class, "" where there is none
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


@dataclass(frozen=True)
class Site:
    """The location of a node in the tree, where it can be replaced."""

    parent: ast.AST
    field: str
    index: int | None
    statement: ast.stmt | None
    function: str

    @property
    def node(self) -> ast.AST:
        value = getattr(self.parent, self.field)
        found: ast.AST = value if self.index is None else value[self.index]
        return found

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module, in source order."""
    found = []
    for place, site in enumerate(sites(ast.parse(source))):
        for choice, other in enumerate(others(site)):
            first, last = lines_of(site)
            texts = [" ".join(ast.unparse(n).split())[:100] for n in (site.node, other)]
            line = getattr(site.node, "lineno", first)
            function = site.function
            found.append(Mutant(path, place, choice, line, last, function, texts[0], texts[1]))
    return found


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Return the module's tree with the fault applied."""
    tree = ast.parse(source)
    site = list(sites(tree))[mutant.place]
    site.put(list(others(site))[mutant.choice])
    return ast.fix_missing_locations(tree)


def sites(tree: ast.Module) -> Iterator[Site]:
    """Yield every node that can be replaced, in a deterministic order."""
    yield from _below(tree, None, (), "")


def _below(
    node: ast.AST, statement: ast.stmt | None, names: tuple[str, ...], function: str
) -> Iterator[Site]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names = (*names, node.name)
    for field, value in ast.iter_fields(node):
        if field in SILENT:
            continue
        inside = function
        if field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = function or ".".join(names)
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _is_silent(child):
                continue
            nearest = child if isinstance(child, ast.stmt) else statement
            at = index if isinstance(value, list) else None
            yield Site(node, field, at, nearest, inside)
            yield from _below(child, nearest, names, inside)


def _is_silent(node: ast.AST) -> bool:
    """Return True for documentation, message texts and imports for annotations."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


def lines_of(site: Site) -> tuple[int, int]:
    """Return the first and last line of a site's statement, or of the statement's head."""
    statement = site.statement
    if statement is None:
        return 0, 0
    last = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    if body:
        last = max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, last


def others(site: Site) -> Iterator[ast.AST]:
    """Yield the possible replacements of a node."""
    yield from _operations(site.node)
    yield from _values(site)
    yield from _statements(site.node)


def _operations(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in COMPARISONS[type(operator)]:
                    ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield _changed(node, ops=ops)
        case ast.BinOp(left=ast.JoinedStr()):
            pass
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield _changed(node, op=OPERATORS[type(node.op)]())
        case ast.BoolOp():
            yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp():
            yield node.operand


def _values(site: Site) -> Iterator[ast.AST]:
    match site.node:
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=bytes() as value):
            yield ast.Constant(b"XX" + value)
        case ast.Constant(value=str() as value) if not _is_for_readers(value, site):
            yield ast.Constant(f"XX{value}")
        case ast.Name(id=name, ctx=context) if name in NAMES:
            yield ast.Name(NAMES[name], context)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert() if not isinstance(
            node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):  # swap branches, as the condition has no operator to mutate
            yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_for_readers(text: str, site: Site) -> bool:
    """Return True if a text is an error message or the value of an enumeration member."""
    if isinstance(site.statement, ast.With | ast.Raise | ast.Assert):
        return True
    return isinstance(site.statement, ast.Assign) and " " in text and not site.function
