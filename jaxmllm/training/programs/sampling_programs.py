"""The programs that draw: the decoder once, then steps from noise to pictures, row by row.

    rows, pools --encode, language_states, exchange--> generator pools         as in training, forward alone
    rows --first_patches--> noise --draw_step x steps--> patches               of each microbatch

Times and guidance are arguments of the programs, so the same programs serve any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxmllm.data.rows.masks import Row
from jaxmllm.row_format import RowFormat
from jaxmllm.training.generator_functions import GeneratorFunctions
from jaxmllm.training.programs.base import Job, Jobs, ProgramName
from jaxmllm.training.programs.generator_programs import DeviceStep
from jaxmllm.training.programs.phased import PhasedPrograms


class SamplingPrograms(PhasedPrograms):
    """Programs that draw with a model of which nothing is trained, and in which text has no loss.

    Args:
      guided: whether rows hold each item with and without conditions; else guidance is not used.
    """

    def __init__(self, *given: Any, guided: bool = True):
        super().__init__(*given)
        self.guided = guided

    def draw(
        self, params: Any, batch: DeviceStep, times: Sequence[float], guidance: float
    ) -> Iterator[tuple[Row, np.ndarray]]:
        """Yield each microbatch of generator rows, as the host filled it, with its drawn patches
        [R / g, g * C, F].

        Args:
          times: from 1 (noise) to 0, before they are shifted.
        """
        host = batch.host
        # Programs are compiled for arrays of this type; a Python number could become another one.
        time_arrays = [np.asarray(time, self._real_dtype) for time in times]
        strength = np.asarray(guidance, self._real_dtype)
        pools, _, _ = self._encode(params, batch, self._none_failed(), backward=False)
        states, _ = self._states(params, batch, pools, backward=False)
        # The states are delivered; nothing reads the language pools while items are drawn.
        del pools
        for phase in self.generators:
            phase_params = self._params_of(params, phase)
            for m, rows in enumerate(batch.rows[phase]):
                pool = states[self.exchange_owner[phase]][host.pools[phase][m]]
                pool_offset = np.int32(host.pool_offsets[phase][m])
                patches = self._microbatch_program("first_patches", phase, host, m)(rows)
                draw_step = self._microbatch_program("draw_step", phase, host, m)
                for time, next_time in pairwise(time_arrays):
                    patches = draw_step(
                        *(phase_params, rows, pool, pool_offset),
                        *(patches, time, next_time, strength),
                    )
                yield host.rows[phase][m], jax.device_get(patches)

    def _jobs(self, formats: Mapping[str, RowFormat]) -> Jobs:
        jobs = self._failed_jobs() | self._language_jobs()
        for exchange in self._exchange_programs.values():
            jobs |= exchange.jobs()
        for phase in self.encoders:
            jobs |= self._encoder_jobs(phase, formats[phase])
        for phase in self.generators:
            jobs |= self._drawing_jobs(phase, formats[phase])
        return jobs

    def _drawing_jobs(self, phase: str, row_format: RowFormat) -> Jobs:
        params = self._params_of(self.params, phase)
        pool = self.pools[self.exchange_owner[phase]]
        spec = self.spec.phases[phase]
        scalar = self._scalar_shape()
        jobs: Jobs = {}
        for row_class in spec.classes:
            functions = GeneratorFunctions(self.functions.spanned(phase, row_class.span), phase)
            layout = functions.step.model.layout(phase)
            rows = self._abstract_generator_rows(phase, layout, row_class, row_format, self.guided)
            # Patches have the shape of the rows' features, but the type of losses, because features
            # are as the host stores them.
            patches = jax.ShapeDtypeStruct(
                rows.features.shape, functions.dtype, sharding=rows.features.sharding
            )
            jobs[ProgramName("first_patches", phase, *row_class)] = Job(
                functions.first_patches, (rows,), patches
            )
            inputs = (
                params,
                rows,
                pool,
                self._scalar_shape(np.int32),
                patches,
                scalar,
                scalar,
                scalar,
            )
            jobs[ProgramName("draw_step", phase, *row_class)] = Job(
                functions.draw_step, inputs, patches, donated=(4,)
            )
        return jobs
