"""Wrong versions of a module, as syntax trees. Arguments of calls are left as they are. No I/O."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """index: of the candidate in the module. description: `function: before -> after`."""

    index: int
    line: int
    description: str


_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """Wrong versions of a node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops = [_COMPARISONS[type(operator)]()]
            yield changed
        case ast.BoolOp():
            changed_op = copy.deepcopy(node)
            changed_op.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield changed_op
        case ast.UnaryOp(op=ast.Not()):
            yield copy.deepcopy(node.operand)
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            changed_sum = copy.deepcopy(node)
            changed_sum.op = _OPERATORS[type(operator)]()
            yield changed_sum
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            changed_call = copy.deepcopy(node)
            changed_call.func = ast.Name(_CALLS[name], ast.Load())
            yield changed_call
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)) if value in (0, 1):
            yield ast.Constant(1 - value)
        case ast.IfExp():
            yield copy.deepcopy(node.body)
            yield copy.deepcopy(node.orelse)
        case ast.Continue():
            yield ast.Break()
        case ast.Raise() | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.If():
            changed_if = copy.deepcopy(node)
            changed_if.test = ast.Constant(False)
            yield changed_if


def mutations(tree: ast.Module) -> list[tuple[Mutation, ast.Module]]:
    """All candidates of a module, with the whole mutated tree of each."""
    results: list[tuple[Mutation, ast.Module]] = []
    places = [*_places(tree)]
    for function, parent, name, position in places:
        node = getattr(parent, name) if position is None else getattr(parent, name)[position]
        for replacement in alternatives(node):
            ast.copy_location(replacement, node)
            _put(parent, name, position, replacement)
            mutated = ast.fix_missing_locations(copy.deepcopy(tree))
            _put(parent, name, position, node)
            before, after = (" ".join(ast.unparse(n).split())[:100] for n in (node, replacement))
            results.append((Mutation(len(results), node.lineno, f"{function}: {before} -> {after}"), mutated))
    return results


def _put(parent: ast.AST, name: str, position: int | None, node: ast.AST) -> None:
    if position is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[position] = node


def _logs(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))):
            return True
    return False


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, int | None]]:
    """(function, parent, field, position) of all statements and expressions in functions, but assertions, texts, logging."""

    def inside(function: str, parent: ast.AST) -> Iterator[tuple[str, ast.AST, str, int | None]]:
        for name, value in ast.iter_fields(parent):
            if name in ("decorator_list", "annotation", "returns", "args", "format_spec"):
                continue
            children = value if isinstance(value, list) else [value]
            for position, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr) or _logs(child):
                    continue
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from inside(".".join(filter(None, (function, child.name))), child)
                    continue
                if function:
                    yield function, parent, name, position if isinstance(value, list) else None
                yield from inside(function, child)

    yield from inside("", tree)
