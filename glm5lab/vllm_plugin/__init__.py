"""Layer 4, the backend: what vLLM loads through its entry points.

`register` (group vllm.general_plugins) runs in every vLLM process and may run more than once;
`platform` (group vllm.platform_plugins) offers the CPU platform. Importing this module loads
neither torch nor vLLM.
"""

BACKEND = "TRITON_MLA_SPARSE"
LOAD_FORMAT = "glm5lab"
QUANTIZATION = "glm5lab"

_registered = False


def register() -> None:
    """Register backend, loader and GGUF models with the running vLLM; repeating it is harmless."""
    global _registered
    if _registered:
        return
    from glm5lab.vllm_plugin import patches

    patches.apply()
    _registered = True


def platform() -> str | None:
    """The platform class that vLLM shall use, or None to leave the choice to vLLM.

    Only where vLLM would take its own CPU platform is ours offered instead.
    """
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    from glm5lab.vllm_plugin.patches import alias_cpu_distribution

    alias_cpu_distribution()
    return "glm5lab.vllm_plugin.cpu.Glm5CpuPlatform"
