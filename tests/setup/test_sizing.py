"""Which examples a pipeline must hold by themselves."""

import numpy as np

from jaxmllm.setup.sizing import LARGEST_EXAMPLES, largest_examples
from tests.balance.stages.test_plan import batch


class Lengths:
    """Examples of a corpus, (text tokens, slots of each image), of which no more is asked."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def longest(self, phase):
        return int(self.gather(np.arange(len(self))).phases[phase].length.max())

    def gather(self, numbers):
        items = batch([self.examples[number] for number in numbers])
        items.examples[:] = numbers
        return items


def test_the_examples_that_need_most_rows_are_among_the_largest():
    """They have fewer slots than many others: 12 images of a row each, or 48 that lie in rows of their size."""
    usual = [(5, [32] * 26)] * LARGEST_EXAMPLES
    corpus = Lengths([(5, [128]), (5, [68] * 12), *usual, (5, [16] * 48), (5, [64] * 12)])
    found = largest_examples(corpus, "vision").examples.tolist()
    assert {1, LARGEST_EXAMPLES + 2} <= set(found) and found == sorted(set(found))
