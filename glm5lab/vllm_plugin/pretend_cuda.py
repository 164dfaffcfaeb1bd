"""Ask vLLM's backend selection about CUDA devices that are not there.

`python -m glm5lab.vllm_plugin.pretend_cuda 12.0 8.9` prints one JSON object. It runs in a process
of its own: a CUDA platform with a chosen compute capability takes the present one's place, and
where vLLM was built without CUDA, empty modules stand for its compiled ones. What selection asks of
them (which FlashAttention there is, whether flashinfer works) is answered as vLLM's CUDA wheel
answers on that device. Nothing is launched.
"""

import contextlib
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from glm5lab.vllm_plugin import cuda_patches, patches

CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla")
# FlashAttention 3 is compiled for Hopper; version 4 knows Hopper and the data-center Blackwells.
FLASH_ATTENTION = {2: (8, 9, 10, 11, 12), 3: (9,), 4: (9, 10, 11)}


def main(capabilities: list[str]) -> None:
    """Print what vLLM chooses for sparse MLA: capability -> flashinfer -> cache dtype -> choice."""
    wanted = [(int(major), int(minor)) for major, minor in (c.split(".") for c in capabilities)]
    stand_in_for_compiled_modules()
    # A dense backend whose import allocates memory on the device; None makes it unavailable.
    sys.modules["vllm.v1.attention.backends.mla.cutlass_mla"] = None  # type: ignore[assignment]
    import vllm.config  # noqa: F401  (before the fork: the children share it)

    table = {
        f"{major}.{minor}": {
            name: in_child((major, minor), flashinfer)
            for name, flashinfer in (("with flashinfer", True), ("without flashinfer", False))
        }
        for major, minor in wanted
    }
    print(json.dumps(table))


def stand_in_for_compiled_modules() -> None:
    """Give a vLLM without CUDA the modules that its CUDA platform imports."""
    if importlib.util.find_spec("vllm._C_stable_libtorch") is not None:
        return
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    package = types.ModuleType("vllm.vllm_flash_attn")
    package.__path__ = []
    interface = types.ModuleType("vllm.vllm_flash_attn.flash_attn_interface")

    def is_supported(version: int) -> bool:
        from vllm.platforms import current_platform

        return current_platform.get_device_capability().major in FLASH_ATTENTION[version]

    def reason(version: int) -> str | None:
        return None if is_supported(version) else f"FA{version} is not for this device"

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this vLLM was built without CUDA")

    names = (
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
        "compile_flash_attn_varlen_func_from_specs",
    )
    for module in (package, interface):
        module.__dict__.update(dict.fromkeys(names, absent))
        module.__dict__["is_fa_version_supported"] = is_supported
        module.__dict__["fa_version_unsupported_reason"] = reason
        sys.modules[module.__name__] = module


def in_child(capability: tuple[int, int], flashinfer: bool) -> dict[str, Any]:
    """`choices` in a forked process, as vLLM remembers much about the device it first saw."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = json.dumps(choices(capability, flashinfer))
        except BaseException as error:
            lines = traceback.format_exception(error)
            answer = json.dumps({"error": "".join(lines)})
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    found = json.loads(answer)
    if "error" in found:
        raise RuntimeError(f"SM{capability[0]}{capability[1]}: {found['error']}")
    return found


def choices(capability: tuple[int, int], flashinfer: bool) -> dict[str, Any]:
    """Cache dtype -> chosen backend, the native choice, and why others were refused.

    vLLM is asked twice: as it is, and with TRITON_MLA_SPARSE in its list.
    """
    platform = pretend(capability)
    pretend_flashinfer(flashinfer)
    with sparse_model():
        native = {dtype: ask(platform, dtype) for dtype in CACHE_DTYPES}
        for part in (patches.register_backend, cuda_patches.offer_on_cuda):
            part()
        return {
            dtype: ask(platform, dtype) | {"native": native[dtype]["chosen"]}
            for dtype in CACHE_DTYPES
        }


def pretend(capability: tuple[int, int]) -> Any:
    """Make a CUDA platform of this capability vLLM's present one; returns its class."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedPlatform(NonNvmlCudaPlatform):
        device_name = f"SM{capability[0]}{capability[1]}"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return cls.device_name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 96 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 128

    vllm.platforms._current_platform = PretendedPlatform()
    return PretendedPlatform


def pretend_flashinfer(present: bool) -> None:
    """Let vLLM's questions about flashinfer be answered with yes, or no, as a whole."""
    from vllm.utils import flashinfer

    special = ("has_flashinfer_sparse_mla_sm120", "has_flashinfer_sm90_nope_mla")
    for name in ("has_flashinfer", *special):
        setattr(flashinfer, name, lambda: present)


@contextlib.contextmanager
def sparse_model() -> Iterator[None]:
    """A vLLM configuration of GLM-5 at eight heads a GPU, for the backends that look at it."""
    from vllm.config import VllmConfig, set_current_vllm_config

    text = types.SimpleNamespace(
        index_topk=2048,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=192,
        model_type="glm_moe_dsa",
    )
    config = VllmConfig()
    model = types.SimpleNamespace(hf_text_config=text, get_num_attention_heads=lambda _: 8)
    object.__setattr__(config, "model_config", model)
    with set_current_vllm_config(config):
        yield


def ask(platform: Any, cache_dtype: str, **further: Any) -> dict[str, Any]:
    """Which backend vLLM takes for GLM-5's sparse MLA in bfloat16, and why not the others.

    Args:
        platform: class of the present platform.
        cache_dtype: as vLLM names it.
        further: fields of vLLM's AttentionSelectorConfig, such as head_size.
    """
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    fields = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": cache_dtype,
        "block_size": None,
        "use_mla": True,
        "use_sparse": True,
    }
    config = AttentionSelectorConfig(**(fields | further))
    capability = platform.get_device_capability()
    valid, refused = platform.get_valid_backends(capability, config, num_heads=8)
    chosen = min(valid, key=lambda candidate: candidate.priority, default=None)
    return {
        "chosen": None if chosen is None else chosen.backend.name,
        "valid": [candidate.backend.name for candidate in valid],
        "refused": {backend.name: reasons for backend, (_, reasons) in refused.items()},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
