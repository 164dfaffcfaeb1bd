"""The doctor: what failed, in logs of vLLM from any number of workers."""

from glm5lab.serving.doctor.diagnosis import diagnose
from glm5lab.serving.doctor.reader import is_log_name, read_lines
from glm5lab.serving.doctor.scan import Scanner
from glm5lab.serving.doctor.verdict import Diagnosis

__all__ = ["Diagnosis", "examine"]


def examine(names: list[str]) -> Diagnosis:
    """Read logs once, in order, and say what failed.

    Args:
        names: files, plain or gzip; `-` is standard input.

    Raises:
        InputError: one is missing, not readable or empty.
    """
    is_log_name(names)
    scans = []
    for name in names:
        scanner = Scanner(name)
        scanner.read(read_lines(name))
        scans.append(scanner.scan)
    return diagnose(scans)
