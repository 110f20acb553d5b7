"""The commands: verbs are listed and answer `--help`, and a wrong verb names the nearest one."""

import subprocess
import sys

import pytest

from jaxmllm.__main__ import VERBS, main


def test_help_lists_every_verb_with_a_line(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, verb in VERBS.items():
        assert any(line.split()[:1] == [name] and line.endswith(verb.summary) for line in lines)


def test_a_wrong_verb_is_one_line_that_names_the_nearest(capsys):
    assert main(["trian", "--config", "x.yaml"]) == 2
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1
    assert "did you mean 'train'?" in error


def test_no_verb_at_all_shows_the_help(capsys):
    assert main([]) == 2
    assert "waste" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_its_options(verb, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([verb, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: jaxmllm {verb} " in capsys.readouterr().out


def test_the_help_is_told_without_loading_jax():
    code = (
        "import sys; from jaxmllm.__main__ import main; main(['--help']); "
        "assert not {'jax', 'numpy'} & {*sys.modules}"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
    )
