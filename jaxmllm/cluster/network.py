"""Seconds of what the programs of a run send, on its mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxmllm.cluster.collectives import Group, collective_seconds
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.sends import Send


class Network:
    """The links between the devices of a mesh on a cluster."""

    def __init__(self, mesh: Any, device: Device):
        from jaxmllm.setup.ahead import whole_axes

        self._device = device
        # Devices along the last axis are neighbours; along others, all inner axes lie between.
        strides: dict[str, int] = {}
        inner = 1
        for axis, size in reversed(mesh.shape.items()):
            strides[axis] = inner
            inner *= size
        # An axis that spans have cut has the stride of its innermost part
        for axis in mesh.shape:
            (whole_axis,) = whole_axes((axis,), mesh)
            strides[whole_axis] = min(strides.get(whole_axis, inner), strides[axis])
        self._strides = strides

    def seconds(self, sends: Iterable[Send]) -> float:
        """Seconds of all sends, one after another."""
        return sum(self._send_seconds(send) for send in sends if send.devices > 1)

    def _send_seconds(self, send: Send) -> float:
        stride = min(self._strides[axis] for axis in send.axes)
        once = collective_seconds(
            self._device.cluster,
            send.operation,
            send.array_bytes,
            Group(send.devices, stride),
            self._device.rates.network,
            self._device.sharing,
        )
        return send.times * once
