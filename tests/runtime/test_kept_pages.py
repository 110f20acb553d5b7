import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has the setting")

# The program has temporary arrays of 64 MiB, each of 16,384 pages of 4 KiB. Now and then one that was just freed is
# not there yet, hence the least of several runs.
FAULTS = """
import sys
from jaxmllm.runtime.kept_pages import keep_pages
if sys.argv[1] == "kept":
    assert keep_pages()
import resource
import jax, jax.numpy as jnp

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run(1.0).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step = lambda i, y: jnp.flip(y) + i
run = jax.jit(lambda x: jax.lax.fori_loop(0, 2, step, jnp.full(1 << 24, x)).sum())
print(min([faults() for _ in range(8)][3:]))
"""


def test_a_program_that_runs_again_maps_no_page_anew():
    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        return int(
            subprocess.run(
                command, cwd=Path(__file__).parents[2], capture_output=True, check=True
            ).stdout
        )

    assert faults("kept") < 1000 < 10_000 < faults("not kept")
