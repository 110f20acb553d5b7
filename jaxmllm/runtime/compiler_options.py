"""Options that XLA compiles the programs of a run with, by platform; no other place sets any.

    compile_jobs, `jaxmllm check` --compiler_options--> Lowered.compile        --describe--> a line for the log

What XLA_FLAGS names is left to XLA_FLAGS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

Options = dict[str, str | bool]

OPTIONS: Final[Mapping[str, Options]] = {
    # Collectives start as early as what they send is there, and are awaited as late as it is read: by default one is
    # awaited where it starts
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    # Fewer copies around loops over layers; and loops over elements take whole registers of AVX-512, where there are
    # any. Together 3 to 4 % of a step (docs/performance.md)
    "cpu": {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_cpu_prefer_vector_width": "512",
    },
}
SAME: Final = {"cuda": "gpu", "rocm": "gpu"}  # platforms by their makers, as devices name them


def compiler_options(platform: str, environment: Mapping[str, str] = os.environ) -> Options:
    """What programs for a platform are compiled with, besides what XLA_FLAGS says."""
    words = environment.get("XLA_FLAGS", "").split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    options = OPTIONS.get(SAME.get(platform, platform), {})
    return {name: value for name, value in options.items() if name not in named}


def describe(platform: str, environment: Mapping[str, str] = os.environ) -> str:
    """The options and XLA_FLAGS, in a line."""
    options = compiler_options(platform, environment)
    chosen = [f"{name}={str(value).lower()}" for name, value in options.items()]
    flags = environment.get("XLA_FLAGS", "").split()
    return f"compiler options: {' '.join(chosen + flags) or 'none'}"
