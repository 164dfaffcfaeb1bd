"""What racecheck reports, less what it cannot know: barriers in memory between partitions.

Kernels in Gluon hand blocks from one partition of warps to another through mbarriers, and Triton
its arguments through barriers of all warps; the compute-sanitizer of CUDA 13.0 follows neither
there. Hazards between two partitions are left to the simulation of `gluon_simulated`; hazards
within one count, and so does every line that is not understood.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import glm5lab.attention

SOURCES = Path(glm5lab.attention.__file__).parent
ACCESS = re.compile(r"(?:Write|Read) access at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)")
Place = tuple[str, int]  # file, line


@cache
def module(file: str) -> ast.Module:
    """A module of `glm5lab.attention`, empty where there is none of that name."""
    path = SOURCES / Path(file).name
    return ast.parse(path.read_text() if path.is_file() else "")


@cache
def function(file: str, name: str) -> tuple[str, ast.FunctionDef] | None:
    """File and definition of a name that a module defines or imports from another."""
    for node in module(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return file, node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return function(f"{(node.module or '').rpartition('.')[2]}.py", name)
    return None


def function_at(place: Place) -> Place | None:
    """File and first line of the function that holds a line."""
    file, line = Path(place[0]).name, place[1]
    for node in module(file).body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return file, node.lineno
    return None


def reached(file: str, name: str) -> frozenset[Place]:
    """A function and all that it calls: file and first line of each."""
    found, ahead = set[Place](), [(file, name)]
    while ahead:
        defined = function(*ahead.pop())
        if defined and (defined[0], defined[1].lineno) not in found:
            where, node = defined
            found.add((where, node.lineno))
            ahead += [(where, n.id) for n in ast.walk(node) if isinstance(n, ast.Name)]
    return frozenset(found)


@cache
def partitions(kernel: str) -> tuple[Place | None, tuple[frozenset[Place], ...]]:
    """Where a kernel stands, and what each of its partitions of warps may run, if it has any."""
    for path in sorted(SOURCES.glob("*.py")):
        defined = function(path.name, kernel)
        if defined is None or defined[0] != path.name:
            continue
        place = path.name, defined[1].lineno
        for node in ast.walk(defined[1]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize":
                assert isinstance(node.args[0], ast.List)
                parts = [part.elts[0] for part in node.args[0].elts if isinstance(part, ast.Tuple)]
                return place, tuple(reached(path.name, ast.unparse(part)) for part in parts)
        return place, ()
    return None, ()


def counts(kernel: str, one: Place, other: Place) -> bool:
    """Whether a hazard lies within a partition, or may."""
    whole, parts = partitions(kernel)
    functions = [function_at(one), function_at(other)]
    at = [(Path(file).name, line) for file, line in (one, other)]
    if parts and at == [whole, whole]:
        return False  # what Triton hands over itself stands at the kernel's first line
    first, second = ({i for i, run in enumerate(parts) if f in run} for f in functions)
    return not first or not second or bool(first & second)


def hazards(report: str) -> list[str]:
    """The hazards of a report that count."""
    return list(_hazards(report))


def _hazards(report: str) -> Iterator[str]:
    first: Place | None = None
    for line in report.splitlines():
        if "Race reported" not in line and " access at " not in line:
            continue
        found = ACCESS.search(line)
        if not found:
            first = None
            yield line
        elif "Race reported" in line:
            first = found[2], int(found[3])
        elif first is None:
            yield line
        elif counts(found[1], first, (found[2], int(found[3]))):
            yield f"{found[1]}: {first[0]}:{first[1]} and {found[2]}:{found[3]}"
