"""Matching rows and ranks: the exact match is as good as the best permutation, the greedy one
uses every rank once."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jaxmllm.balance.exchange import row_ranks
from jaxmllm.balance.exchange.row_ranks import PLACEMENT_SEARCH, Places, best_ranks


def test_the_exact_match_is_the_best_of_all_permutations(make):
    """A token gains once on the node of its reader, and once more in the
    reader's block of the grid."""
    random = np.random.default_rng(1)
    row = random.integers(0, 5, 30)
    target = random.integers(0, 5, 30)
    tokens = random.integers(1, 100, 30)
    node = np.array([0, 0, 1, 1, 1], np.int32)
    grid = make.grid((5, 1, 1))

    def gain(ranks):
        rank = np.asarray(ranks)[row]
        in_block = (np.argwhere(grid.language == target[:, None, None])[:, 1] == rank).astype(int)
        return int((tokens * ((node[rank] == node[target]).astype(int) + in_block)).sum())

    match = best_ranks(row, tokens, Places.of_groups(1, target, grid, node, node))
    assert sorted(match) == list(range(5))
    assert gain(match) == max(gain(ranks) for ranks in itertools.permutations(range(5)))


def test_the_greedy_match_uses_every_rank_once_and_nodes_first(make, monkeypatch):
    """Every row has one item, and as many items want a node as it has ranks,
    so all can have theirs."""
    monkeypatch.setattr(
        row_ranks, "PLACEMENT_SEARCH", dataclasses.replace(PLACEMENT_SEARCH, exact_ranks=1)
    )
    random = np.random.default_rng(2)
    grid = make.grid((12, 1, 1))
    node = np.repeat(np.arange(3, dtype=np.int32), 4)
    target = random.permutation(12)
    row_groups = Places.of_groups(1, target, grid, node, node)
    ranks = best_ranks(np.arange(12), random.integers(1, 100, 12), row_groups)
    assert sorted(ranks) == list(range(12))
    assert (node[ranks] == node[target]).all()
