"""Which module runs, in forward and in backward."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch

from .steptrace import EventKind, Pass

ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of AccumulateGrad nodes: they run as soon as they can


class ModuleCalls:
    """Which module runs: in forward from module hooks, in backward from the sequence numbers of autograd nodes.

    A module call that entered at sequence number s0 and left at s1 made exactly the nodes s0 <= n < s1, and the engine runs
    nodes in falling order of n.  So in backward a call is entered before the first node below s1 and left before the first
    node below s0: the forward's markers, walked backwards, with the calls that made no node in their right place.
    """

    def __init__(self, module: torch.nn.Module, emit: Callable[..., None], storages: Callable[[Any], tuple[int, ...]]) -> None:
        self.root_output: tuple[int, ...] = ()  # storages of what the root module returned last
        self._storages = storages
        self.modules: dict[str, str] = {}
        self._index: dict[int, int] = {}
        for fqn, child in module.named_modules():
            self._index[id(child)] = len(self.modules)
            self.modules[fqn] = type(child).__name__
        self._emit = emit
        self.call_module: list[int] = []
        self.call_parent: list[int] = []
        self._stack: list[int] = []
        self.in_backward = False
        self._markers: list[tuple[int, int, bool]] = []  # (sequence number, call, enters)
        self._owner_from: list[int] = [0]  # sequence numbers at which the running call changes ...
        self._owner: list[int] = [-1]  # ... and the call that runs from there
        self._cursor = -1
        self._floor = 0
        self._outer: list[tuple[int, int]] = []  # saved (cursor, floor) while a nested backward walks its own markers
        self._pending: tuple[int, int] | None = None  # (first marker, first sequence number) of a recompute just done

    def install(self) -> list[Any]:
        hooks = torch.nn.modules.module
        return [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        index = self._index.get(id(module))
        if index is None:
            return
        sequence = torch.autograd._get_sequence_nr()
        if self.in_backward and not self._stack:
            self.running_node()  # the calls that the node entered come before its recompute
            self._pending = (len(self._markers), sequence)
        call = len(self.call_module)
        self.call_module.append(index)
        self.call_parent.append(self._stack[-1] if self._stack else -1)
        self._stack.append(call)
        self._mark(sequence, call, True)
        self._emit(EventKind.ENTER, call, Pass.RECOMPUTE if self.in_backward else Pass.FORWARD)

    def _leave(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if id(module) not in self._index or not self._stack:
            return
        call = self._stack.pop()
        if not self._stack and not self.in_backward:
            self.root_output = self._storages(output)
        self._mark(torch.autograd._get_sequence_nr(), call, False)
        self._emit(EventKind.LEAVE, call, Pass.RECOMPUTE if self.in_backward else Pass.FORWARD)

    def running_fqn(self) -> str:
        if not self._stack:
            return ""
        return list(self.modules)[self.call_module[self._stack[-1]]]

    def _mark(self, sequence: int, call: int, enters: bool) -> None:
        self._markers.append((sequence, call, enters))
        running = self._stack[-1] if self._stack else -1
        if self._owner_from[-1] == sequence:
            self._owner[-1] = running
        else:
            self._owner_from.append(sequence)
            self._owner.append(running)

    def start_backward(self) -> None:
        self._cursor, self._floor = len(self._markers) - 1, 0

    def running_node(self) -> int:
        """The sequence number of the autograd node that runs (-1: none), after entering and leaving calls up to it."""
        if self._stack:  # a recompute runs inside backward: its ops are forward ops
            return -1
        node = torch._C._current_autograd_node()
        if node is None:
            return -1
        sequence = int(node._sequence_nr())
        if sequence != ACCUMULATE_GRAD:
            self._walk_to(sequence)
        return sequence

    def _walk_to(self, sequence: int) -> None:
        if self._pending is not None:
            first, start = self._pending
            self._pending = None
            if sequence >= start:  # a nested backward over the recomputed graph (reentrant checkpoint)
                self._outer.append((self._cursor, self._floor))
                self._cursor, self._floor = len(self._markers) - 1, first
        while True:
            while self._cursor >= self._floor and self._markers[self._cursor][0] > sequence:
                self._reverse(self._markers[self._cursor])
                self._cursor -= 1
            if not self._outer or self._cursor >= self._floor or sequence >= self._markers[self._floor][0]:
                return
            self._cursor, self._floor = self._outer.pop()

    def _reverse(self, marker: tuple[int, int, bool]) -> None:
        _, call, entered = marker
        self._emit(EventKind.LEAVE if entered else EventKind.ENTER, call, Pass.BACKWARD)

    def finish_backward(self) -> None:
        """Leaves the calls that the last node was inside of."""
        if not self.in_backward:
            return
        while True:
            while self._cursor >= self._floor:
                self._reverse(self._markers[self._cursor])
                self._cursor -= 1
            if not self._outer:
                return
            self._cursor, self._floor = self._outer.pop()

    def position(self, node_sequence: int, in_backward: bool) -> tuple[int, Pass]:
        """(call, pass) of the op being recorded."""
        if not in_backward:
            return (self._stack[-1] if self._stack else -1), Pass.FORWARD
        if self._stack:
            return self._stack[-1], Pass.RECOMPUTE
        if node_sequence in (-1, ACCUMULATE_GRAD):
            return self._last, Pass.BACKWARD
        self._last = self._owner[bisect.bisect_right(self._owner_from, node_sequence) - 1]
        return self._last, Pass.BACKWARD

    _last = -1
