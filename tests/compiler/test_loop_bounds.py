"""What a kernel adds up in a loop must be read by more than the bounds of inner loops.

Otherwise Triton 3.6 keeps its first value (https://github.com/triton-lang/triton/pull/9036).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import regard

KERNELS = Path(regard.__file__).parent / "kernels"
Loop = ast.For | ast.While


def names(nodes: Iterable[ast.AST], read: bool) -> list[ast.Name]:
    """The names that are read, or those that are written."""
    kind = ast.Load if read else ast.Store
    return [x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind)]


def unrolled(loop: Loop) -> bool:
    return isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)


def added_up(loop: Loop) -> set[str]:
    """What a loop writes from its value before."""
    inside = [x for node in loop.body for x in ast.walk(node)]
    found = {x.target.id for x in inside if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name)}
    for x in inside:
        if isinstance(x, ast.Assign):
            found |= {y.id for y in names([x], read=False)} & {y.id for y in names([x.value], read=True)}
    return found


def only_bounds(loop: Loop) -> set[str]:
    """What a loop writes and, but for that, reads in bounds of inner loops alone."""
    inside = [x for node in loop.body for x in ast.walk(node)]
    bounds = [x.iter for x in inside if isinstance(x, ast.For) and not unrolled(x)]
    found = {x.id for x in names(loop.body, read=False)} & {x.id for x in names(bounds, read=True)}
    for x in list(found):
        updates = [
            y for y in inside if isinstance(y, ast.Assign | ast.AugAssign) and x in {z.id for z in names([y], False)}
        ]
        known = {id(y) for y in names([*bounds, *updates], read=True)}
        if any(y.id == x and id(y) not in known for y in names(loop.body, read=True)):
            found.remove(x)
    return found


def unread(function: ast.FunctionDef) -> set[str]:
    """The functions that this one calls without reading what they return."""
    read = {x.id for x in names([function], read=True)}
    calls = [x for x in ast.walk(function) if isinstance(x, ast.Expr | ast.Assign) and isinstance(x.value, ast.Call)]
    return {ast.unparse(x.value.func).split(".")[-1] for x in calls if read.isdisjoint(y.id for y in names([x], False))}


def lost(*sources: str) -> Iterator[str]:
    """What is added up for bounds alone: after the loop at most a `return` reads it, whose result some call ignores.

    A result that goes through several functions before it is lost is not found.
    """
    functions = [x for source in sources for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    discarded = {name for function in functions for name in unread(function)}
    for function in functions:
        inside = list(ast.walk(function))
        returned = {id(x) for x in names((y for y in inside if isinstance(y, ast.Return)), read=True)}
        for loop in (x for x in inside if isinstance(x, Loop) and not unrolled(x)):
            for name in only_bounds(loop) & added_up(loop):
                after = [x for x in names([function], read=True) if x.id == name and x.lineno > (loop.end_lineno or 0)]
                if not after or (function.name in discarded and returned.issuperset(map(id, after))):
                    yield f"{function.name}: {name}"


def test_no_kernel_adds_up_for_bounds_alone() -> None:
    assert list(lost(*(path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")))) == []


SUMS = """
def visit_all(counts, visits):
    for h in range(heads):
        for v in range(visits, visits + counts[h]):
            visit(v)
        visits += counts[h]
    return visits

def program():
    {}visit_all(counts, 0)
"""


def test_such_a_sum_is_found() -> None:
    found = ["visit_all: visits"]
    assert list(lost(SUMS.format(""))) == found
    assert list(lost(SUMS.format("total = "))) == found
    assert list(lost(SUMS.format("").replace("visits +=", "visits = visits +"))) == found
    assert list(lost(SUMS.format("return "))) == []
    assert list(lost(SUMS.format("").replace("visit(v)", "visit(visits)"))) == []
