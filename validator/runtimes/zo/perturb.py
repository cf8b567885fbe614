"""Seed replay: the perturbation and the update of zeroth-order SGD, parameter by parameter, with z drawn again every time.

z ~ N(0, 1) has the parameter's shape, dtype and device, and is never kept: whoever needs it again starts a generator from
the same seed and draws in the same order.  The transients are those of zo2/optimizer/mezo_sgd/zo.py (0.1.1): for a parameter
of n elements of e bytes 3·n·e to perturb (z, c·z, c·z·eps), 4·n·e to update (z, g·z, wd·p, their sum), 2·n·e to update what
does not decay.  The last z of a parameter lives until the first of the next one is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

FORWARD: Final = "forward"
# What happens at a unit: scales of z that are added, and forward passes.  They sum to 0: the parameters end as they were, up to
# rounding.
Schedule = tuple[int | str, ...]
BOTH: Schedule = (1, FORWARD, -2, FORWARD, 1)
PLUS: Schedule = (1, FORWARD, -1)
MINUS: Schedule = (-1, FORWARD, 1)
# With the very additions of BOTH, so that the parameters are bitwise those of MeZO.
PLUS_REPLAYED: Schedule = (1, FORWARD, -2, 1)
MINUS_REPLAYED: Schedule = (1, -2, FORWARD, 1)

_NO_DECAY = ("bias", "layer_norm", "layernorm", "ln")  # parts of names, as MeZO and zo2 have them


@dataclass(frozen=True)
class Step:
    """Which numbers one optimizer step uses."""

    seed: int
    lr: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Named:
    """A trainable parameter and its full name."""

    name: str
    parameter: nn.Parameter

    @property
    def decays(self) -> bool:
        return not any(part in self.name for part in _NO_DECAY)


def generator(seed: int, device: torch.device) -> torch.Generator:
    """A generator where the parameters are, so that the global one is left alone."""
    return torch.Generator(device=device).manual_seed(seed)


@torch.no_grad()
def perturb(params: Sequence[Named], scale: int, eps: float, source: torch.Generator, *, rebind: bool = False) -> None:
    """Adds scale·eps·z to every parameter.  `rebind`: into a new tensor, as princeton-nlp/MeZO does, not in place."""
    for named in params:
        p = named.parameter
        z = draw(p, source)
        if rebind:
            p.data = p.data + scale * z * eps
        else:
            p.data.add_(scale * z * eps)


@torch.no_grad()
def update(params: Sequence[Named], grad: float, step: Step, source: torch.Generator, *, rebind: bool = False) -> None:
    """SGD along z: p -= lr·(grad·z + weight_decay·p), with every name's decay decided by the full name."""
    for named in params:
        p = named.parameter
        z = draw(p, source)
        if rebind and named.decays:
            p.data = p.data - step.lr * (grad * z + step.weight_decay * p.data)
        elif rebind:
            p.data = p.data - step.lr * (grad * z)
        elif named.decays:
            p.data.sub_(step.lr * (grad * z + step.weight_decay * p.data))
        else:
            p.data.sub_(step.lr * grad * z)


def draw(p: Tensor, source: torch.Generator) -> Tensor:
    """The next z of the stream that `source` is."""
    return torch.normal(mean=0.0, std=1.0, size=tuple(p.shape), generator=source, device=p.device, dtype=p.dtype)


def projected_gradient(losses: Tensor, eps: float) -> float:
    """(loss at +eps - loss at -eps) / (2·eps) of the two losses, in their dtype."""
    return float(((losses[0] - losses[1]) / (2 * eps)).item())
