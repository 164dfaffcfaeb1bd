"""What `vllm serve` makes of its words on a machine that pretends to have GPUs.

    python vllm_serve_config.py WORDS...

WORDS are those behind `vllm serve`. Prints one line of JSON: quantization, load format, dtype,
tensor-parallel ranks, expert parallel.
"""

import argparse
import json
import sys
from typing import Any

from vllm_cuda_plan import stand_in_for_operations

from glm5lab.vllm_plugin import pretend_cuda


def config_of(words: list[str]) -> Any:
    """The engine's configuration, as the command itself comes to it (entrypoints/cli/serve.py)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = FlexibleArgumentParser()
    commands: Any = parser.add_subparsers(parser_class=FlexibleArgumentParser)
    ServeSubcommand().subparser_init(commands)
    args: argparse.Namespace = parser.parse_args(["serve", *words])
    args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


if __name__ == "__main__":
    pretend_cuda.stand_in_for_compiled_modules()
    platform = pretend_cuda.pretend((9, 0))
    platform.device_count = classmethod(lambda cls: 2)
    stand_in_for_operations()
    config = config_of(sys.argv[1:])
    found = {
        "quantization": config.model_config.quantization,
        "load_format": config.load_config.load_format,
        "dtype": str(config.model_config.dtype),
        "ranks": config.parallel_config.tensor_parallel_size,
        "expert_parallel": config.parallel_config.enable_expert_parallel,
    }
    print("CONFIG", json.dumps(found), flush=True)
