"""Media of the tests of length indexes, and a count of what is measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.data.media.images import Images
from jaxmllm.data.media.reference import File
from jaxmllm.data.media.sounds import Sounds


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """The media: a.png has 4 x 6 patches, b.png 2 x 2, and c.wav has 50 frames."""
    Image.new("RGB", (24, 16)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    soundfile.write(tmp_path / "c.wav", np.zeros(8000), 16_000)
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose headers were read."""
    names: list[str] = []
    for kind in (Images, Sounds):

        def measure(self: Any, media: File, real: Any = kind.measure) -> Any:
            names.append(media.path.name)
            return real(self, media)

        monkeypatch.setattr(kind, "measure", measure)
    return names
