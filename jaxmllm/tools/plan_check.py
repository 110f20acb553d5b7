"""Planned layouts whose programs are compiled for the cluster's chip: `jaxmllm plan --check N`.

ranked layouts --programs on devices of the chip--> compiled bytes --too many--> struck out, the next takes its place
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Final

from jaxmllm.cluster.clusters import Cluster
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.search.chosen_config import chosen_config
from jaxmllm.cluster.search.layouts import PlannedLayout, SearchResult, program_words, ranked
from jaxmllm.cluster.search.no_layout import why_none
from jaxmllm.cluster.search.sieves import Planner
from jaxmllm.config.schema import ConfigError
from jaxmllm.models.compose import laid_out
from jaxmllm.setup.ahead import FailedProgram, compiled_memory, target_mesh
from jaxmllm.setup.build import phased_programs
from jaxmllm.setup.chips import CHIPS, Chip, ChipError, chip_of

CHIPS_OF_KINDS: Final = {chip.device_kind: chip for chip in CHIPS.values() if chip.device_kind}


@dataclass(frozen=True)
class Checked:
    """The outcome of `--check`."""

    asked: int  # layouts to compile
    compiled: int = 0  # layouts that were compiled, including those that were struck out
    not_checked: str | None = None  # why nothing was compiled
    staged: int = 0  # of those asked for, layouts in stages, which are not compiled here

    @property
    def line(self) -> str:
        if self.not_checked is not None:
            return (
                f"not checked by a compiler, bytes of all layouts are estimates: {self.not_checked}"
            )
        staged = f"; {self.staged} in stages: give their plan.yaml to `jaxmllm check`"
        return (
            f"layouts compiled: {self.compiled}; bytes of the others are estimates"
            + staged * bool(self.staged)
        )


def check(result: SearchResult, planner: Planner, number: int) -> Checked:
    """Compile the first `number` layouts of `result.ranked`. Their bytes are then the compiler's;
    layouts that do not fit are struck out. Layouts in stages keep their estimates.

    Raises:
      ConfigError: no layout is left.
    """
    done: set[int] = set()
    devices = result.ranked[0].choice.devices
    try:
        chip = chip_of_cluster(planner.cluster)
        # One at a time: where a layout is struck out, the next moves up among the first
        while todo := [
            candidate
            for candidate in result.ranked[:number]
            if id(candidate) not in done and candidate.choice.stages == 1
        ]:
            layout = _compile_layout(result, planner, todo[0], chip)
            other_layouts = [candidate for candidate in result.ranked if candidate is not todo[0]]
            remaining = other_layouts if layout is None else [*other_layouts, layout]
            if not remaining:
                raise ConfigError(why_none(planner, result, devices))
            result.ranked = ranked(remaining)
            done.add(id(layout if layout is not None else todo[0]))
    except ChipError as error:
        return Checked(number, len(done), str(error))
    staged = sum(candidate.choice.stages > 1 for candidate in result.ranked[:number])
    return Checked(number, len(done), staged=staged)


def chip_of_cluster(cluster: Cluster) -> Chip:
    """The chip that programs for a cluster are compiled for.

    Raises:
      ChipError: there is no compiler for the cluster's devices.
    """
    kind = cluster.device_kind
    if cluster.shared_cores:
        return chip_of("cpu")
    if kind not in CHIPS_OF_KINDS:
        raise ChipError(
            f"programs cannot be compiled for {kind or cluster.name}; only for {', '.join(CHIPS_OF_KINDS)}"
        )
    return CHIPS_OF_KINDS[kind]


def _compile_layout(
    result: SearchResult, planner: Planner, layout: PlannedLayout, chip: Chip
) -> PlannedLayout | None:
    """The layout with the compiler's bytes; None if it is struck out."""
    began = time.perf_counter()
    config = chosen_config(layout)
    mesh = target_mesh(config, chip, layout.choice.devices)
    model = laid_out(planner.model, config.components, mesh)
    planned = layout.programs
    programs = phased_programs(
        config, model, planned.formats, layout.spec, planned.functions.sources
    )
    temporaries = {}
    for name, memory in compiled_memory(config, programs, chip).items():
        if isinstance(memory, FailedProgram):
            why = f"{program_words(name)} does not compile"
            result.reject(why)
            result.struck.append((layout, f"{why}: {memory.reason}"))
            return None
        temporaries[name] = memory.temporaries
    peak = programs_peak(programs, temporaries, layout.microbatches)
    layout = replace(layout, peak=peak)
    print(
        f"compiled {layout.choice.words} for {chip.name}: {time.perf_counter() - began:.0f} s",
        file=sys.stderr,
    )
    return layout if planner.fits(layout, result) else None
