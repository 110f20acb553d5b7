"""Old names of keys are refused wherever they are written, by an error that names the new one."""

import pytest

from jaxmllm.config.read import config_tree, dotted_values, load_config, parse_config
from jaxmllm.config.renamed import RENAMED, REPLACED, renamed_keys
from jaxmllm.config.schema import RenamedKeyError
from jaxmllm.config.strict_yaml import write_text
from tests.support import tiny_config


@pytest.fixture
def tree(tmp_path):
    return config_tree(parse_config(tiny_config(tmp_path)))


def test_only_new_names_are_keys(tree):
    keys = {key for key, _ in dotted_values(tree)}
    for old_name, new_name in RENAMED.items():
        assert any(key == new_name or key.startswith(f"{new_name}.") for key in keys), (
            f"{new_name} is no key"
        )
        assert not any(key == old_name or key.startswith(f"{old_name}.") for key in keys), (
            f"{old_name} is still a key"
        )
    assert renamed_keys(tree) == []


@pytest.mark.parametrize("old", RENAMED)
def test_an_override_by_an_old_name_is_refused(tree, tmp_path, old):
    path = tmp_path / "run.yaml"
    path.write_text(write_text(tree))
    value = "{}" if old == "data.sounds" else "1"
    with pytest.raises(
        RenamedKeyError, match=rf"run.yaml: .*{old!r} is now called {RENAMED[old]!r}"
    ):
        load_config(path, [f"{old}={value}"])


@pytest.mark.parametrize("old", REPLACED)
def test_an_override_of_a_key_that_is_gone_is_refused(tree, tmp_path, old):
    path = tmp_path / "run.yaml"
    path.write_text(write_text(tree))
    with pytest.raises(RenamedKeyError, match=rf"run.yaml: {old!r} is gone: leave it out; .*spans"):
        load_config(path, [f"{old}=null"])


def test_a_file_is_told_all_its_old_names_at_once(tree):
    tree["data"]["sounds"] = {"hop": 160, "max_seconds": 5}
    tree["pipeline"] |= {"live": 4, "fan": 2}
    with pytest.raises(RenamedKeyError) as caught:
        parse_config(tree)
    assert str(caught.value) == (
        "config: 'data.sounds' is now called 'data.audio'; 'data.sounds.hop' is now called 'data.audio.hop_length'; "
        "'pipeline.live' is now called 'pipeline.microbatches_in_flight'; "
        "'pipeline.fan' is now called 'pipeline.encoder_rows_per_microbatch'"
    )
