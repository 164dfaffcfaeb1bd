"""What racecheck reports, less what it cannot know: barriers in memory between partitions.

Kernels in Gluon hand blocks from one partition of warps to another through mbarriers, and Triton
its arguments through barriers of all warps; compute-sanitizer 2025.3 follows neither there. Hazards
between two partitions are left to the simulation of `gluon_simulated`; hazards within one count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import glm5lab.attention

SOURCES = Path(glm5lab.attention.__file__).parent
ACCESS = re.compile(r"(?:Write|Read) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)")


def function_at(file: str, line: int) -> str | None:
    """The function of a module of `glm5lab.attention` that holds a line."""
    if not (SOURCES / file).is_file():
        return None
    tree = ast.parse((SOURCES / file).read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    return None


def partitioned(kernel: str) -> bool:
    """Whether a kernel's warps are specialized."""
    for path in SOURCES.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == kernel:
                return "warp_specialize" in ast.unparse(node)
    return False


def pairs(report: str) -> Iterator[tuple[str, tuple[str, int], tuple[str, int]]]:
    """Kernel and both places of each hazard: the first access of a paragraph, and one more."""
    first = None
    for line in report.splitlines():
        found = ACCESS.search(line)
        if not found:
            continue
        place = (found[2], int(found[3]))
        if "Race reported" in line:
            first = place
        elif first is not None:
            yield found[1], first, place


def hazards(report: str) -> list[str]:
    """The hazards of a report that count."""
    counted = []
    for kernel, one, other in pairs(report):
        functions = [function_at(*one), function_at(*other)]
        apart = None not in functions and functions[0] != functions[1]
        handed_over = functions == [kernel, kernel]
        if not (partitioned(kernel) and (apart or handed_over)):
            counted.append(f"{kernel}: {one[0]}:{one[1]} and {other[0]}:{other[1]}")
    return counted
