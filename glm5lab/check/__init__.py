"""Layer 4's proof: engine log-probabilities equal those of HF transformers and of llama.cpp."""

from glm5lab.check.report import CheckReport
from glm5lab.check.run import run_check

__all__ = ["CheckReport", "run_check"]
