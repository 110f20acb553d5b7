"""Rings that cannot exist are refused."""

import pytest

from sharding.pipeline.ring import Chain, PipelineError, Ring


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ((), "distinct names"),
        ((Chain("a", (0,), (1,)), Chain("a", (1,), (1,))), "distinct names"),
        ((Chain("a", (0, 1), (1,)),), "1 layer counts for 2 chunks"),
        ((Chain("a", (0, 2), (1, 1)),), "pipeline of 2 stages"),
        ((Chain("a", (0,), (-1,)),), "chunk of -1 layers"),
    ],
)
def test_rings_that_cannot_be(chains, message):
    with pytest.raises(PipelineError, match=message):
        Ring(2, chains)


def test_a_chunk_lies_no_further_than_on_the_next_rank():
    with pytest.raises(PipelineError, match="chunk 1 of a lies on rank 2, after rank 0"):
        Ring(4, (Chain("a", (0, 2), (1, 1)),))
    Ring(4, (Chain("a", (3, 0, 0, 1), (1, 1, 1, 1)),))
