"""The command line of `jaxmllm train`."""

import itertools

import pytest

from jaxmllm.train import parse_arguments

CONFIG = ["--config", "x.yaml"]


@pytest.mark.parametrize("resume", [[], ["--resume"], ["--resume=auto"]], ids=str)
def test_overrides_and_flags_stand_in_any_order(resume):
    """Every order of a flag, --config and two overrides, the second one with and without --set."""
    for second_override in (["b=2"], ["--set", "b=2"]):
        for order in itertools.permutations([CONFIG, ["a=1"], second_override, resume]):
            options = parse_arguments([word for words in order for word in words])
            assert sorted(options.overrides) == ["a=1", "b=2"], order
            assert options.config == "x.yaml"
            assert (
                options.resume
                == {"": False, "--resume": True, "--resume=auto": "auto"}["".join(resume)]
            )


def test_overrides_keep_their_order_so_that_the_last_one_wins():
    options = parse_arguments(["a=1", *CONFIG, "a=2", "--resume", "a=3"])
    assert options.overrides == ["a=1", "a=2", "a=3"]
    assert options.resume is True


def test_set_takes_several_and_several_times():
    options = parse_arguments(["--set", "a=1", "b=2", *CONFIG, "--set", "c=3", "--resume", "d=4"])
    assert options.overrides == ["a=1", "b=2", "c=3", "d=4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume=yes"], "--resume"),
        (["--resume", "auto"], "write --resume=auto"),
        (["--res"], "unrecognized arguments: --res"),
    ],
)
def test_what_cannot_be_read_ends_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments([*CONFIG, *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_compiling_alone_does_not_resume(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(["--config", "x.yaml", "--compile-only", "--resume"])
    assert exit_info.value.code == 2
    assert "--compile-only trains nothing" in capsys.readouterr().err
