"""Hosts that plan differently are stopped before they hang."""

import numpy as np
import pytest

from jaxmllm.training.loop import TrainingError, check_digests


def test_equal_digests_pass():
    check_digests(7, np.tile(np.arange(8, dtype=np.uint8), (3, 1)))


def test_a_different_digest_names_the_step_and_both():
    digests = np.zeros((3, 8), np.uint8)
    digests[2, -1] = 255
    with pytest.raises(TrainingError, match=r"step 7: the plan of process 2 is 00000000000000ff.* 0000000000000000"):
        check_digests(7, digests)
