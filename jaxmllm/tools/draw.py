"""Draw pictures and clips with a run that has learned to, any sizes together, packed into rows as
in training.

    jaxmllm draw --run runs/draw --prompt "a red circle, top left" --size 256x384 --out pictures
    jaxmllm draw --run runs/draw --prompt "a red circle moves right" --size 64x64 --frames 16 --out clips
    jaxmllm draw --run runs/draw --jsonl prompts.jsonl --steps 20 --guidance 2.5 --seed 0 --out pictures [mesh.data=1]

A size is height x width in pixels. Each line of the file is one picture or clip: {"prompt": ..,
"size": "256x384"}, or instead of the prompt "messages" as in training, which may show images;
"frames", "seed" and "name" are optional. Pictures are written as NAME.png, clips as animated
NAME.png, or with --clips mp4 as NAME.mp4, by the package av (pip install av). Latents are written
as NAME.npy, [channels, (frames,) height, width]; their sizes count numbers of a channel, not
pixels. The picture of a prompt and seed is the same whatever else is drawn with it. Weights are
those of the run's latest checkpoint, averages (components.<name>.ema) where it has any. Overrides
may set where and how rows are computed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from jaxmllm.config.command_line import add_overrides, parse
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.media.video_files import lacks_writer, write_video
from jaxmllm.data.sources.requests import Requests
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.distributed import LaunchError, start_jax
from jaxmllm.setup.sampling import Drawn, check_guidance, drawing_config, plan_drawing
from jaxmllm.setup.spans import node_spans
from jaxmllm.tools.arguments import command_parser, positive_int, seed_int
from jaxmllm.training.run import USER_ERRORS
from jaxmllm.training.run_folder import check_writable
from jaxmllm.training.saved_parameters import saved_parameters
from sharding.mesh import make_mesh

MOST_STEPS = 10_000
FPS = 8.0  # of clips, if neither --fps nor the config sets it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm draw")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="what to draw")
    asked.add_argument(
        "--jsonl", type=Path, metavar="FILE", help="file with one picture or clip per line"
    )
    parser.add_argument(
        "--size", metavar="HxW", help="height and width of the picture of --prompt, in pixels"
    )
    parser.add_argument(
        "--frames", type=positive_int, help="frames of a clip of --prompt (default: draw a picture)"
    )
    parser.add_argument(
        "--fps", type=float, help="frames per second of clips (default: data.generated.fps, else 8)"
    )
    parser.add_argument(
        "--clips",
        choices=["png", "mp4"],
        default="png",
        help="file type of clips (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps from noise to picture (default: %(default)s)"
    )
    parser.add_argument(
        "--guidance",
        type=float,
        default=2.5,
        help="strength of guidance; 1: none (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed_int, default=0, help="seed of the noise")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    add_overrides(parser)
    options = parse(parser, arguments)
    if (options.prompt is None) != (options.size is None):
        parser.error("--prompt needs --size, and lines of --jsonl have sizes of their own")
    if options.frames is not None and options.prompt is None:
        parser.error("--frames is of --prompt: lines of --jsonl have frames of their own")
    if options.fps is not None and not 0 < options.fps <= 1000:
        parser.error("--fps must be a number above 0, at most 1000")
    if not 1 <= options.steps <= MOST_STEPS:
        parser.error(f"--steps must be 1 to {MOST_STEPS}")
    if not 0 <= options.guidance < float("inf"):
        parser.error("--guidance must be a number of at least 0")

    try:
        config = drawing_config(options.run, options.overrides)
        check_guidance(config, options.guidance)
        check_clips(config, options.clips)
        check_writable(options.out, "--out")
        if options.jsonl is None:
            requests = Requests.of_prompt(
                options.prompt, options.size, options.frames, options.seed
            )
        else:
            requests = Requests.of_file(options.jsonl, options.seed)
        start_jax(config)
        rate = options.fps or config.data.generated.fps or FPS
        writer = Writer(options.out, rate, options.clips)
        draw(config, requests, options.steps, options.guidance, writer)
    except (
        *USER_ERRORS,
        CheckpointError,
        LaunchError,
        OSError,
    ) as error:  # OSError: a full disk
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check_clips(config: Config, clips: str) -> None:
    """Raise `ConfigError` if clips cannot be written as this kind of file."""
    if clips == "png":
        return
    if config.model.diffusion is not None and config.model.diffusion.channels is not None:
        raise ConfigError(
            f"--clips {clips}: the run draws latents (model.diffusion.channels), which are written as .npy; leave it "
            "out"
        )
    if why := lacks_writer():
        raise ConfigError(f"--clips {clips}: {why}; or leave it out for animated .png")


def draw(config: Config, requests: Requests, steps: int, guidance: float, writer: Writer) -> None:
    """Write a file for each request, and print how many were drawn in what time.

    Raises:
      ConfigError, MeshError: the config cannot be run on these devices.
      DataError: requests cannot be drawn.
      CheckpointError: there are no weights.
    """
    if jax.process_count() > 1:
        raise ConfigError("jaxmllm draw runs in one process; start it without a launcher")
    mesh = make_mesh(config.mesh_sizes, spans=node_spans(config, config.mesh_sizes))
    # Guidance 1 uses predictions with conditions alone, so rows need no items without conditions.
    drawing = plan_drawing(config, requests, mesh, guided=guidance != 1)
    params, _ = saved_parameters(Path(config.run.directory), drawing.programs.params)
    began = time.monotonic()
    drawing.programs.compile()
    print(f"compiled in {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    files = 0
    for drawn in drawing.drawn(params, steps, guidance):
        writer(drawn)
        files += 1
    print(f"{files} drawn in {time.monotonic() - began:.1f} s: {writer.folder}")


@dataclass(frozen=True)
class Writer:
    """Writes what was drawn into a folder."""

    folder: Path
    fps: float = FPS  # of clips
    clips: str = "png"  # or "mp4"

    def __call__(self, drawn: Drawn) -> None:
        if drawn.is_latent:
            latents = np.moveaxis(drawn.frames, -1, 0).astype(np.float32)
            np.save(self._file_path(drawn, "npy"), latents if drawn.is_clip else latents[:, 0])
        elif drawn.is_clip and self.clips == "mp4":
            write_video(self._file_path(drawn, "mp4"), drawn.pixels, self.fps)
        else:
            first_frame, *later_frames = map(Image.fromarray, drawn.pixels)
            moving: dict[str, Any] = {"save_all": True, "append_images": later_frames, "loop": 0}
            moving["duration"] = 1000 / self.fps
            # Blending does not change opaque frames, but Pillow joins equal ones of one blend
            moving["blend"] = [index % 2 for index in range(len(drawn.frames))]
            first_frame.save(self._file_path(drawn, "png"), **(moving if drawn.is_clip else {}))

    def _file_path(self, drawn: Drawn, kind: str) -> Path:
        return self.folder / f"{drawn.name}.{kind}"
