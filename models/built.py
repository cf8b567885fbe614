"""`BuiltModel`: what `build` hands over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class MakeBatch(Protocol):
    def __call__(
        self, batch_size: int, seq_len: int, *, target_len: int | None = None, image_size: int | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A module ready to train.

    `make_batch(batch_size, seq_len)` gives the keyword arguments of one step, labels included, made with plain torch calls.
    `step(module, batch)` runs the forward pass and returns the loss, a scalar tensor.
    `attention` is what the module was really built with; `notes` says what differs from what was asked.
    """

    module: nn.Module
    make_batch: MakeBatch
    step: Callable[[nn.Module, Mapping[str, Any]], Tensor]
    attention: str
    notes: list[str] = field(default_factory=list)
