"""`glm5lab bench kernels`: our kernels beside every peer that the machine has, in one run.

Each result is checked in the run that times it. A peer that is missing is listed with why.
"""
