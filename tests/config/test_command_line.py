"""Overrides on the command line: in any place, with and without --set, and in order."""

import argparse

import pytest

from jaxmllm.config.command_line import add_config, parse


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    add_config(parser)
    parser.add_argument("--steps", type=int, default=1)
    return parser


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ([], []),
        (["a=1", "b=2"], ["a=1", "b=2"]),
        (["--set", "a=1", "b=2", "--steps", "3", "c=4"], ["a=1", "b=2", "c=4"]),
        (["c=4", "--set", "a=1", "--set", "b=2"], ["a=1", "b=2", "c=4"]),
    ],
)
def test_overrides_keep_their_order_those_of_set_first(parser, words, overrides):
    for command in (["--config", "x.yaml", *words], [*words, "--config", "x.yaml"]):
        options = parse(parser, command)
        assert (options.config, options.overrides) == ("x.yaml", overrides)


def test_a_config_is_needed_unless_the_command_can_do_without():
    parser = argparse.ArgumentParser()
    add_config(parser, required=False)
    assert parse(parser, []).config is None
