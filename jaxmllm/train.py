"""jaxmllm train --config configs/quickstart.yaml [--resume[=auto] | --compile-only] [dotted.key=value ...]

`python -m jaxmllm.train` is the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxmllm.config.command_line import add_config, parse
from jaxmllm.config.schema import ConfigError
from jaxmllm.families.resolved import load_run_config
from jaxmllm.runtime.signals import StopSignals


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line into `config`; `resume`: False, True or "auto"; `compile_only`; and
    `overrides` in the order given, those of --set first.

    A command line that cannot be parsed ends the process with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="jaxmllm train", description="Train a multimodal language model.", allow_abbrev=False
    )
    add_config(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint of the run folder; if that is new or empty, start the run",
    )
    # A flag with "=" in its name: an optional value of --resume would swallow an override after it.
    parser.add_argument(
        "--resume=auto",
        dest="resume",
        action="store_const",
        const="auto",
        help="the same, and start the run even in a folder with other files, such as logs; for requeued jobs",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile the programs of a run, keep them (run.compilation_cache), and stop without training",
    )
    options = parse(parser, arguments)
    if options.compile_only and options.resume:
        parser.error(
            "--compile-only trains nothing, so there is nothing to --resume: leave one out"
        )
    if "auto" in options.overrides:
        parser.error("write --resume=auto: after a space, auto is read as an override")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    with StopSignals() as stop:
        return run(options, stop)


def run(options: argparse.Namespace, stop: StopSignals) -> int:
    """Train, or only compile, as the command line says; return the exit code."""
    try:
        config = load_run_config(options.config, options.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxmllm.runtime import hosts
    from jaxmllm.runtime.distributed import LaunchError, start_jax, stopped_code

    stop.tell = hosts.tell_end
    try:
        code_when_stopped = stopped_code()
        start_jax(config)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except hosts.HostsError as error:
        hosts.leave_at_once(f"error: {error}", hosts.EXIT_CODE)

    import jax

    from jaxmllm.runtime.compilation_cache import check_kept
    from jaxmllm.runtime.metrics import imported_wandb
    from jaxmllm.setup.build import build_run
    from jaxmllm.training.loop import RUN_ERRORS, train
    from jaxmllm.training.run import USER_ERRORS
    from jaxmllm.training.run_folder import open_folder

    with hosts.ending_together((*USER_ERRORS, *RUN_ERRORS, hosts.HostsError)) as outcome:
        if options.compile_only:
            check_kept(config)
            compiled = build_run(config)
            compiled.say(compiled.describe())
            return 0
        with open_folder(config, options.resume) as checked:
            if checked.logging.wandb is not None and jax.process_index() == 0:
                imported_wandb(checked.logging.wandb)  # fail now, not after minutes of compiling
            summary = train(build_run(checked), stop)
        if not summary["complete"]:
            outcome.code = code_when_stopped
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
