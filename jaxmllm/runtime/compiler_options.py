"""Options with which XLA compiles the programs of a run, by platform; nothing else sets any.

    compile_jobs, `jaxmllm check` --compiler_options--> Lowered.compile        --describe--> a line for the log

Options that XLA_FLAGS names are left as it sets them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

Options = dict[str, str | bool]

OPTIONS: Final[Mapping[str, Options]] = {
    # Collectives start as soon as their inputs are ready and are awaited when their outputs are
    # read; by default each is awaited where it starts
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    # Fewer copies around loops over layers, and loops over elements that use whole AVX-512
    # registers where there are any. Together they save 3 to 4 % of a step (docs/performance.md)
    "cpu": {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_cpu_prefer_vector_width": "512",
    },
}
SAME: Final = {"cuda": "gpu", "rocm": "gpu"}  # keys of `OPTIONS`, by platform as devices name it


def compiler_options(platform: str, environment: Mapping[str, str] = os.environ) -> Options:
    """Options for programs of a platform, without those that XLA_FLAGS sets."""
    words = environment.get("XLA_FLAGS", "").split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    options = OPTIONS.get(SAME.get(platform, platform), {})
    return {name: value for name, value in options.items() if name not in named}


def describe(platform: str, environment: Mapping[str, str] = os.environ) -> str:
    """Line for the log with the options and XLA_FLAGS."""
    options = compiler_options(platform, environment)
    chosen = [f"{name}={str(value).lower()}" for name, value in options.items()]
    flags = environment.get("XLA_FLAGS", "").split()
    return f"compiler options: {' '.join(chosen + flags) or 'none'}"
