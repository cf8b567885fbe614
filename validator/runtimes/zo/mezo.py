"""MeZO: zeroth-order SGD with the whole model on the device (princeton-nlp/MeZO large_models/trainer.py; zo2 0.1.1 with
zo2=False).

z is drawn unit by unit in calling order, so that ZO2 can be compared step by step; the original draws in order of
registration, which allocates the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Unit
from .perturb import BOTH, FORWARD, Step, generator, perturb, projected_gradient, update
from .transfer import Place, place_on_device


class Mezo:
    """The model is updated at the end of every step."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        place: Place,
        *,
        context: Callable[[], AbstractContextManager[Any]],
        rebind: bool = False,
    ) -> None:
        """`context`: what a forward pass runs in.  `rebind`: every change makes a new tensor, as princeton-nlp/MeZO does."""
        self._params = [named for unit in units for named in unit.params]
        self._units, self._place, self._context, self._rebind = units, place, context, rebind
        place.recorder.mark("init")
        place_on_device(place, [*module.parameters(), *module.buffers()])

    def step(self, loss: Callable[[], Tensor], step: Step) -> tuple[tuple[float, float], float]:
        """The losses at +eps and -eps, and the projected gradient along z."""
        recorder = self._place.recorder
        losses = []
        for action in BOTH:
            if action == FORWARD:
                recorder.mark("forward")
                losses.append(self._forward(loss))
            else:
                recorder.mark("perturb")
                perturb(self._params, int(action), step.eps, self._z(step), rebind=self._rebind)
        pair = torch.stack(losses).float()
        del losses
        grad = projected_gradient(pair, step.eps)
        recorder.mark("update")
        update(self._params, grad, step, self._z(step), rebind=self._rebind)
        return (float(pair[0]), float(pair[1])), grad

    def evaluate(self, loss: Callable[[], Tensor]) -> float:
        self._place.recorder.mark("eval")
        return float(self._forward(loss))

    def flush(self) -> None:
        """Nothing is ever left to do."""

    def visit(self) -> Iterator[Unit]:
        """The units in order; all are on the device."""
        yield from self._units

    def close(self) -> None:
        """The module is a plain one all the time."""

    def _forward(self, loss: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad(), self._context():
            return loss().detach()

    def _z(self, step: Step) -> torch.Generator:
        return generator(step.seed, self._place.device)
