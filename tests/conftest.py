"""Eight forced CPU devices for every test, set before anything imports jax."""

import os

from hypothesis import settings

FLAG = "--xla_force_host_platform_device_count"
QUICK = "--xla_backend_optimization_level=0"  # the tests compile far more than they compute
kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(f"{FLAG}=") and flag != QUICK]
os.environ["XLA_FLAGS"] = " ".join([*kept, QUICK, f"{FLAG}=8"])
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxmllm.training.distributed import reserve_cpu_threads  # noqa: E402

reserve_cpu_threads()

# Compilation makes first examples slow, and a red build must be red again for whoever repeats it.
settings.register_profile("jaxmllm", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("jaxmllm")
