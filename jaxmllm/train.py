"""python -m jaxmllm.train --config configs/quickstart.yaml [--resume] [--set dotted.key=value ...]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxmllm.config import ConfigError, load_config


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxmllm.train", description="Train a multimodal language model.")
    parser.add_argument("--config", required=True, help="YAML file of the run; configs/ has examples")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint of the run folder")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="dotted.key=value", help="replace values of the file"
    )
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="the same, without --set")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, [*options.set, *options.overrides])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxmllm.training.distributed import LaunchError, start_jax

    try:
        start_jax(config.run.param_dtype)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxmllm.training.build import USER_ERRORS, build_run
    from jaxmllm.training.loop import RUN_ERRORS, check_folder, train

    try:
        check_folder(config, options.resume)
        train(build_run(config))
    except (*USER_ERRORS, *RUN_ERRORS) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
