"""One rank of a real GLM-5 as vLLM builds it, without memory and without other ranks.

    python vllm_rank.py FILE TP PP RANK EXPERT_PARALLEL [QUANTIZATION]

Parameters are meta tensors and the process group is torch's fake one, so that any rank of any
split can be asked on a small machine. Prints each parameter's bytes as one line of JSON.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

BASE = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


def fake_groups() -> None:
    """Let vLLM make its groups without asking the ranks that are not there."""
    new_group, init_group = dist.new_group, parallel_state.init_model_parallel_group
    dist.new_group = lambda ranks=None, *args, **kwargs: new_group(ranks, backend="fake")
    parallel_state.init_model_parallel_group = lambda *args, **kwargs: init_group(
        *args, **{**kwargs, "use_message_queue_broadcaster": False}
    )
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * group.size()
    # It looks into a tensor, for the log.
    ExpertMapManager.get_compressed_map_string = lambda self: ""
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: BASE)


def build(
    file: str,
    tp: int,
    pp: int,
    rank: int,
    expert_parallel: bool,
    device: str = "meta",
    draft: bool = False,
    **options: Any,
) -> tuple[torch.nn.Module, Any]:
    """One rank's model as vLLM builds it, and the engine's configuration.

    With `draft` it is the model of multi-token prediction, for which `options` must ask.
    """
    load_general_plugins()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp)
    fake_groups()
    config = EngineArgs(
        model=file,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=64,
        **options,
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(tp * pp, rank, "tcp://127.0.0.1:1", 0, "fake")
        parallel_state.initialize_model_parallel(tp, pp, backend="fake")
    return initialize(config, device, draft), config


def initialize(config: Any, device: str, draft: bool = False) -> torch.nn.Module:
    """The model of a configuration, its parameters without values."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    other = config.speculative_config.draft_model_config if draft else None
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype, torch.device(device):
        return initialize_model(vllm_config=config, model_config=other)


def parameter_bytes(*arguments: Any, **options: Any) -> dict[str, int]:
    """Bytes of each parameter of one rank, by name; arguments as for `build`."""
    model, _ = build(*arguments, **options)
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters()}


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    tp, pp, rank, expert_parallel = map(int, numbers[:4])
    quantized = {"quantization": numbers[4], "dtype": "bfloat16"} if numbers[4:] else {}
    sizes = parameter_bytes(path, tp, pp, rank, bool(expert_parallel), **quantized)
    print("SIZES", json.dumps(sizes), flush=True)
