"""What is run: backends, cache formats and serving features, and which answers are compared."""

from dataclasses import dataclass, field
from typing import Any

LENGTHS = (17, 900, 2047, 2048, 2049, 6000, 30000)
OURS, FLASHMLA, FLASH_ATTN = "TRITON_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"
HF = "transformers"  # no backend of vLLM's: the referee


@dataclass(frozen=True)
class EngineCase:
    """One engine.

    Attributes:
        name: of the case.
        backend: vLLM's name of the attention backend, or HF.
        kind: of the model, see `model.architecture`.
        options: further arguments of vllm.LLM; of HF "dtype" alone.
        env: variables of its process.
        together: all prompts at once as well: mixed batches.
        again: every prompt two times more, without log-probabilities of the prompt, for which
            vLLM leaves its prefix cache aside.
        sleeps: every prompt again after the engine has slept and woken.
        gpus: how many the engine takes.
    """

    name: str
    backend: str
    kind: str = "full"
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    together: bool = False
    again: bool = False
    sleeps: bool = False
    gpus: int = 1


EAGER = {"enforce_eager": True}
FP8 = {"kv_cache_dtype": "fp8_ds_mla"}
CHUNKS = {"max_num_batched_tokens": 1024, "enable_prefix_caching": True}
FLASH_CHUNKS = CHUNKS | {"enable_prefix_caching": False}
# Prompts no longer than the top-k attend densely elsewhere: here the sparse kernel serves them.
MQA = {"attention_config": {"sparse_mla_force_mqa": True}}
TRITON = {"GLM5LAB_INDEXER": "triton"}


def mtp(tokens: int) -> dict[str, Any]:
    """Speculative decoding with the model's own MTP layer."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": tokens}}


def parallel(**sizes: int) -> dict[str, Any]:
    """Options of an engine on several GPUs, such as tensor=2; NCCL alone moves the data."""
    named = {f"{name}_parallel_size": size for name, size in sizes.items()}
    return named | {"disable_custom_all_reduce": True}


CASES = (
    EngineCase("flash_attn", FLASH_ATTN, options=EAGER),
    EngineCase("flashmla", FLASHMLA, options=EAGER),
    EngineCase("ours", OURS, options=EAGER),
    EngineCase("hf", HF),
    EngineCase("hf fp32", HF, options={"dtype": "float32"}),
    EngineCase("flashmla fp8", FLASHMLA, options=EAGER | FP8),
    EngineCase("ours fp8", OURS, options=EAGER | FP8),
    EngineCase("flash_attn graphs", FLASH_ATTN, together=True),
    EngineCase("ours graphs", OURS, together=True),
    EngineCase("ours fp8 graphs", OURS, options={"kv_cache_dtype": "fp8"}, together=True),
    EngineCase("flash_attn mtp 3", FLASH_ATTN, options=mtp(3)),
    EngineCase("ours mtp 1", OURS, options=mtp(1)),
    EngineCase("ours mtp 3", OURS, options=mtp(3)),
    EngineCase("ours triton indexer", OURS, env=TRITON, together=True),
    EngineCase("ours triton indexer mtp 3", OURS, options=mtp(3), env=TRITON),
    EngineCase("flash_attn chunks", FLASH_ATTN, options=CHUNKS, again=True),
    EngineCase("ours chunks", OURS, options=CHUNKS, again=True),
    EngineCase("flash_attn mqa", FLASH_ATTN, options=MQA),
    EngineCase("ours mqa", OURS, options=MQA),
    EngineCase("ours asleep", OURS, options={"enable_sleep_mode": True}, sleeps=True),
    EngineCase("flash_attn tp 2", FLASH_ATTN, options=parallel(tensor=2), gpus=2),
    EngineCase("ours tp 2", OURS, options=parallel(tensor=2), gpus=2),
    EngineCase("ours dcp 2", OURS, options=parallel(tensor=2, decode_context=2), gpus=2),
    EngineCase("ours pp 2", OURS, options=parallel(pipeline=2), gpus=2),
    EngineCase("flash_attn share", FLASH_ATTN, "share"),
    EngineCase("flashmla share", FLASHMLA, "share", options=EAGER),
    EngineCase("ours share", OURS, "share"),
    EngineCase("flash_attn flash", FLASH_ATTN, "flash", options=EAGER),
    EngineCase("flash_attn flash graphs", FLASH_ATTN, "flash"),
    # vLLM 0.33's prefix cache asks for GLM-5.3-Flash's linear attention, which is left out here.
    EngineCase("flash_attn flash chunks", FLASH_ATTN, "flash", options=FLASH_CHUNKS),
    EngineCase("ours flash graphs", OURS, "flash"),
)

# Rows of 512 have one native backend here, which differs from itself in other batches.
FLASH_SPREAD = ("natives, GLM-5.3-Flash", "natives, GLM-5.3-Flash, chunks")
# Ranks of tensor parallelism add in another order.
RANKS_SPREAD = ("natives, TP 2",)
# Which answers are compared: a name -> two cases, and the comparisons of native backends whose
# spread bounds it (none: it is such a comparison itself).
PAIRS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "natives": ("flash_attn", "flashmla", ()),
    "natives, flash_attn and HF": ("hf", "flash_attn", ()),
    "natives, flashmla and HF": ("hf", "flashmla", ()),
    "natives, HF in float32": ("hf fp32", "flash_attn", ()),
    "natives, bf16 and fp8": ("flashmla", "flashmla fp8", ()),
    "natives, eager and graphs": ("flash_attn", "flash_attn graphs", ()),
    "natives, MTP 3": ("flash_attn graphs", "flash_attn mtp 3", ()),
    "natives, chunks": ("flash_attn graphs", "flash_attn chunks", ()),
    "natives, sparse prompts": ("flash_attn graphs", "flash_attn mqa", ()),
    "natives, IndexShare": ("flash_attn share", "flashmla share", ()),
    "natives, GLM-5.3-Flash": ("flash_attn flash", "flash_attn flash graphs", ()),
    "natives, GLM-5.3-Flash, chunks": (
        "flash_attn flash graphs",
        "flash_attn flash chunks",
        (),
    ),
    "natives, TP 2": ("flash_attn graphs", "flash_attn tp 2", ()),
    "ours and flash_attn": ("flash_attn", "ours", ("natives",)),
    "ours and flashmla": ("flashmla", "ours", ("natives",)),
    "ours and HF": ("hf", "ours graphs", ("natives, flash_attn and HF",)),
    "ours and HF in float32": ("hf fp32", "ours graphs", ("natives, HF in float32",)),
    "ours fp8 and flashmla fp8": ("flashmla fp8", "ours fp8", ("natives, bf16 and fp8",)),
    "ours, graphs and flash_attn's": ("flash_attn graphs", "ours graphs", ("natives",)),
    "ours fp8, eager and graphs": ("ours fp8", "ours fp8 graphs", ("natives, bf16 and fp8",)),
    "ours, MTP 1": ("ours graphs", "ours mtp 1", ("natives",)),
    "ours, MTP 3": ("ours graphs", "ours mtp 3", ("natives",)),
    "ours, Triton indexer": ("ours graphs", "ours triton indexer", ("natives",)),
    "ours, Triton indexer, MTP 3": ("ours graphs", "ours triton indexer mtp 3", ("natives",)),
    "ours, TP 2": ("ours graphs", "ours tp 2", RANKS_SPREAD),
    "ours, DCP 2": ("ours graphs", "ours dcp 2", RANKS_SPREAD),
    "ours, PP 2": ("ours graphs", "ours pp 2", ("natives",)),
    "ours, chunks": ("ours graphs", "ours chunks", ("natives, chunks",)),
    "ours and flash_attn, sparse prompts": (
        "flash_attn mqa",
        "ours mqa",
        ("natives, sparse prompts",),
    ),
    "ours and flash_attn, IndexShare": (
        "flash_attn share",
        "ours share",
        ("natives, IndexShare",),
    ),
    "ours and flash_attn, GLM-5.3-Flash": (
        "flash_attn flash graphs",
        "ours flash graphs",
        FLASH_SPREAD,
    ),
    "ours and flashmla, IndexShare": ("flashmla share", "ours share", ("natives, IndexShare",)),
}
