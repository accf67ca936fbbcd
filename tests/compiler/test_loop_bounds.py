"""What a kernel counts over a loop is needed by more than the bounds of the loops inside.

Else Triton 3.6 takes it for the number that it begins with (https://github.com/triton-lang/triton/pull/9036).
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


def lost(*sources: str) -> Iterator[str]:
    """What is counted for bounds alone: behind the loop at most a `return` reads it, whose result a call discards."""
    nodes = [x for source in sources for x in ast.walk(ast.parse(source))]
    discarded = {ast.unparse(x.value.func) for x in nodes if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call)}
    for function in (x for x in nodes if isinstance(x, ast.FunctionDef)):
        inside = list(ast.walk(function))
        returned = {id(x) for x in names((y for y in inside if isinstance(y, ast.Return)), read=True)}
        counted = {x.target.id for x in inside if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name)}
        for loop in (x for x in inside if isinstance(x, Loop) and not unrolled(x)):
            for name in only_bounds(loop) & counted:
                behind = [x for x in names([function], read=True) if x.id == name and x.lineno > (loop.end_lineno or 0)]
                if not behind or (function.name in discarded and returned.issuperset(map(id, behind))):
                    yield f"{function.name}: {name}"


def test_no_kernel_counts_for_bounds_alone() -> None:
    assert list(lost(*(path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")))) == []


COUNTS = """
def visit_all(counts, visits):
    for h in range(heads):
        for v in range(visits, visits + counts[h]):
            visit(v)
        visits += counts[h]
    return visits

def program():
    {}visit_all(counts, 0)
"""


def test_such_a_count_is_found() -> None:
    assert list(lost(COUNTS.format(""))) == ["visit_all: visits"]
    assert list(lost(COUNTS.format("total = "))) == []
    assert list(lost(COUNTS.format("").replace("visit(v)", "visit(visits)"))) == []
