"""What a kernel adds up in a loop must be read by more than the bounds of inner loops.

Otherwise Triton 3.6 keeps its first value (https://github.com/triton-lang/triton/pull/9036).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import regard

KERNELS = Path(regard.__file__).parent / "kernels"


def reads(*nodes: ast.AST) -> list[ast.Name]:
    return [x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]


def lost(*sources: str) -> Iterator[str]:
    """Sums that bounds alone read, and perhaps a `return` whose result some call ignores.

    A result that goes through several functions before it is ignored is not found.
    """
    nodes = [x for source in sources for x in ast.walk(ast.parse(source))]
    ignored = {ast.unparse(x.value.func) for x in nodes if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call)}
    for function in (x for x in nodes if isinstance(x, ast.FunctionDef)):
        returns = [x for x in ast.walk(function) if isinstance(x, ast.Return) and function.name in ignored]
        for loop in (x for x in ast.walk(function) if isinstance(x, ast.For | ast.While)):
            inside = list(ast.walk(loop))
            bounds = reads(*(x.iter for x in inside if isinstance(x, ast.For) and x is not loop))
            sums = [x.target.id for x in inside if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name)]
            useless = {id(x) for x in [*bounds, *reads(*returns)]}
            used = {x.id for x in reads(function) if x.lineno >= loop.lineno and id(x) not in useless}
            for name in {x.id for x in bounds}.intersection(sums) - used:
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
    assert list(lost(SUMS.format(""))) == ["visit_all: visits"]
    assert list(lost(SUMS.format("return "))) == []
    assert list(lost(SUMS.format("").replace("visit(v)", "visit(visits)"))) == []
