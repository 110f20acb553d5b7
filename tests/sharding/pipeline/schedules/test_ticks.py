"""Orders that cannot be followed are refused."""

import pytest

from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.orders import gpipe
from sharding.pipeline.schedules.ticks import follow
from tests.sharding.pipeline.schedules.test_orders import plain


def test_orders_that_cannot_be_followed():
    graph = plain(2, 2)
    orders = gpipe(graph).orders
    with pytest.raises(PipelineError, match="every operation once"):
        follow(graph, [orders[0][:-1], orders[1]])
    with pytest.raises(PipelineError, match="every operation once"):
        follow(graph, orders[::-1])
    with pytest.raises(PipelineError, match="wait for each other"):
        follow(graph, [orders[0][::-1], orders[1]])
