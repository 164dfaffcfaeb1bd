"""Whether PyTorch has a CUDA device, asked by commands that do nothing without one."""

from glm5lab.errors import InputError


def require_cuda(command: str) -> None:
    """InputError where there is no CUDA device: asked before a command does or writes anything.

    Args:
        command: without `glm5lab`, such as "bench kernels".
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            command,
            f"there is no CUDA device, as torch {torch.__version__} sees it",
            "run it on a machine with an NVIDIA GPU and a CUDA build of torch",
        )
