"""L2L as real training steps: what the relay is compared with.

"Training Large Neural Networks with Constant Memory using a New Execution Algorithm" (arXiv 2002.05645).  The model's own
forward runs once for every micro batch, in a thread of its own that stops at every block (`zo.lockstep`); a block runs for all
of them before the next one comes.  Autograd sees one layer at a time: a block is run again in backward, from its stashed input,
with a graph of its own.

What a layer needs is uploaded before its turn and dropped after it; weights, gradients and optimizer are on the host.  Dropout
draws the same numbers in both runs of a block.  Trains on a GPU as well; on the CPU every storage carries the tier that it
stands for.  Storages are followed by a dispatch mode there, under which autograd adds two gradients out of place where it would
add in place: a parameter that one layer uses twice (LayoutLM's tables of positions) is measured once too large.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...errors import CannotTell, UserError
from ...models import check_sizes
from ...planner.optimizers.traced import make_optimizer
from ...planner.strategies.l2l import L2lSettings
from ...planner.trace.options import AUTOCAST_DTYPE, TraceOptions
from ...planner.trace.prepare import block_list, ready
from ..loop import _no_garbage_collection, _to_device
from ..measurement import PhaseBytes, Usage
from .zo.blocks import Unit
from .zo.lockstep import Inputs, Lockstep
from .zo.measure import BOOKKEEPING, INIT, PAGEABLE, CudaRecorder, Recorder, StorageRecorder
from .zo.transfer import Place

if TYPE_CHECKING:
    from ...models import ModelSpec
    from .zo.measure import Phase

_PROBE_TOKENS = 8  # of the forward pass that finds the order of the units


@dataclass(frozen=True, kw_only=True)
class L2lRun:
    """What is run."""

    model: ModelSpec
    settings: L2lSettings = field(default_factory=L2lSettings)
    precision: str = "fp32"
    optimizer: str = "adamw"
    optimizer_impl: str = "for-loop"
    micro_batch_size: int = 1
    seq_len: int = 64
    grad_accum_steps: int = 1
    """Micro batches of a step."""
    steps: int = 2
    seed: int = 0
    attention: Literal["sdpa", "eager"] = "sdpa"
    loss: str = "model"
    frozen: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class L2lMeasurement:
    """What a run used, and what it computed."""

    counter: Literal["live", "allocated"]
    phases: tuple[Phase, ...]
    losses: tuple[tuple[float, ...], ...]
    """Of every step, one a micro batch."""
    parameters: dict[str, Tensor]
    """After the last step, on the host."""

    def usage(self) -> Usage:
        """In the form in which predictions are compared; "forward" is a whole training step."""
        placed = [p for p in self.phases if p.step == INIT]
        parts = {
            ("init", "first"): placed,
            ("forward", "first"): [p for p in self.phases if p.step == 0],
            ("forward", "later"): [p for p in self.phases if p.step > 0],
        }
        return Usage(
            counter=self.counter,
            phases=tuple(
                PhaseBytes(
                    phase=name, step=step, peak_bytes=max(p.peak_bytes for p in found), after_bytes=found[-1].after_bytes
                )
                for (name, step), found in parts.items()
                if found
            ),
            components={},
            detail={
                "host_pinned_bytes": max(p.host_pinned_bytes for p in self.phases),
                "host_pageable_bytes": max(p.host_pageable_bytes for p in self.phases),
            },
        )


def run_l2l(run: L2lRun, recorder: Recorder | None = None) -> L2lMeasurement:
    """Runs the steps for real.

    Raises UserError for models that are no decoders or encoders of equal blocks, CannotTell for blocks of another kind.
    """
    check_sizes(run.model, run.micro_batch_size, run.seq_len)
    before = torch.get_num_threads()
    if run.device == "cpu":
        torch.set_num_threads(1)  # sums over another number of threads round in another way
    try:
        return _run(run, recorder or (CudaRecorder() if run.device == "cuda" else StorageRecorder()))
    finally:
        torch.set_num_threads(before)


def _run(run: L2lRun, recorder: Recorder) -> L2lMeasurement:
    torch.manual_seed(run.seed)
    options = TraceOptions(
        batch_size=run.micro_batch_size,
        seq_len=run.seq_len,
        precision=run.precision.removesuffix("-mixed"),
        attention=run.attention,
        loss=run.loss,
        target="cpu",
        frozen=run.frozen,
    )
    built = ready(run.model, options)
    module = built.module
    few = min(_PROBE_TOKENS, run.seq_len)
    layers = find_layers(module, lambda: built.step(module, built.make_batch(1, few)))
    gc.collect()
    recorder.adopt(module)
    losses = []
    with recorder.thread(), _no_garbage_collection() as collect:
        with recorder.tier(BOOKKEEPING):
            host_batches = [built.make_batch(run.micro_batch_size, run.seq_len) for _ in range(run.grad_accum_steps)]
        place = Place(torch.device(run.device), recorder, run.settings.overlap)
        relay = Relay(module, layers, place, run.settings, _context(run))
        trained = [p for p in module.parameters() if p.requires_grad]
        stepped = trained
        if run.precision.endswith("-mixed"):
            with recorder.tier(PAGEABLE):
                stepped = [nn.Parameter(p.detach().float()) for p in trained]
        optimizer = make_optimizer(run.optimizer, run.optimizer_impl, stepped)
        batches: list[dict[str, Any]] = []
        for number in range(run.steps):
            recorder.begin_step(number)
            recorder.mark("batch")
            batches = [_to_device(batch, run.device) for batch in host_batches]
            losses.append(relay.step([_loss_of(built.step, module, batch) for batch in batches]))
            recorder.mark("step")
            with recorder.tier(PAGEABLE):
                if stepped is not trained:
                    _widen_grads(trained, stepped)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if stepped is not trained:
                    _narrow(stepped, trained)
            collect()
        recorder.begin_step(run.steps)
        relay.close()
    return L2lMeasurement(
        counter=recorder.counter,
        phases=tuple(recorder.phases),
        losses=tuple(losses),
        parameters={name: p.detach().clone() for name, p in module.named_parameters()},
    )


def _widen_grads(narrow: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> None:
    for p, master in zip(narrow, masters, strict=True):
        if p.grad is not None:
            master.grad = p.grad.float()
            p.grad = None


@torch.no_grad()
def _narrow(masters: Sequence[nn.Parameter], narrow: Sequence[nn.Parameter]) -> None:
    for master, p in zip(masters, narrow, strict=True):
        p.copy_(master)


def _loss_of(step: Callable[..., Tensor], module: nn.Module, batch: Mapping[str, Any]) -> Callable[[], Tensor]:
    return lambda: step(module, batch)


def _context(run: L2lRun) -> Callable[[], AbstractContextManager[Any]]:
    narrow = AUTOCAST_DTYPE.get(run.precision)
    if narrow is None:
        return contextlib.nullcontext
    dtype = getattr(torch, narrow)
    # its cache would keep the narrow weights of layers that have gone
    return lambda: torch.autocast(run.device, dtype=dtype, cache_enabled=False)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What is uploaded together: the parameters of one block, or of all that is called before or behind the blocks."""

    name: str
    params: tuple[nn.Parameter, ...]
    unit: Unit | None = None
    """Of a block."""


def find_layers(module: nn.Module, probe: Callable[[], Any]) -> list[_Layer]:
    """The layers in calling order, the first and the last of them outside the blocks.  `probe` runs one small forward pass.

    A parameter that several layers use belongs to the first of them.
    Raises UserError for a model without a list of equal blocks that are called one after the other.
    """
    path, blocks = block_list(module)
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = [m for m in module.modules() if id(m) not in inside and any(True for _ in m.parameters(recurse=False))]
    calls: list[nn.Module] = []
    hooks = [m.register_forward_pre_hook(lambda part, args: calls.append(part)) for m in (*blocks, *outside)]
    with torch.no_grad(), torch.random.fork_rng([]):
        probe()
    for hook in hooks:
        hook.remove()
    if [m for m in calls if m in blocks] != list(blocks):
        raise UserError(f"{type(module).__name__} does not go through {path} once from first to last", "Use --method full")
    turn = calls.index(blocks[0])
    front = [p for m in calls[:turn] for p in m.parameters(recurse=False)]
    tail = [p for m in calls[turn:] if m not in blocks for p in m.parameters(recurse=False)]
    owned: set[nn.Parameter] = set()

    def layer(name: str, params: Sequence[nn.Parameter], unit: Unit | None = None) -> _Layer:
        mine = {p for p in params if p not in owned}
        owned.update(mine)
        return _Layer(name, tuple(p for p in module.parameters() if p in mine), unit)

    found = [layer("front", front)]
    for number, block in enumerate(blocks):
        unit = Unit(f"{path}.{number}", block, number, (), (), block.forward)
        found.append(layer(unit.name, list(block.parameters()), unit))
    return [*found, layer("tail", tail)]


@dataclass
class _Stash:
    """What one run of a block was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Tensor
    """The state of the device's generator before."""


class _Copies:
    """The two streams of copies beside the one that computes; on the CPU, and without overlap, everything runs in order."""

    def __init__(self, place: Place) -> None:
        self._on = place.device.type == "cuda" and place.overlap
        if self._on:
            self._upload, self._offload = torch.cuda.Stream(place.device), torch.cuda.Stream(place.device)
            self._computed, self._left = torch.cuda.Event(), torch.cuda.Event()
            self._arrived: dict[_Layer, torch.cuda.Event] = {}

    def computed(self) -> None:
        """All that has been issued so far: an upload takes memory of layers that went, so it waits for that."""
        if self._on:
            self._computed.record()

    @contextlib.contextmanager
    def uploading(self, layer: _Layer) -> Iterator[None]:
        if not self._on:
            yield
            return
        with torch.cuda.stream(self._upload):
            self._upload.wait_event(self._computed)
            yield
            self._arrived[layer] = self._upload.record_event()

    def arrive(self, layer: _Layer) -> None:
        """What is computed from here on waits for the layer."""
        if self._on and layer in self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived.pop(layer))

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        if not self._on:
            yield
            return
        self._offload.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._offload):
            yield
            self._left.record(self._offload)

    def wait_for_leaving(self) -> None:
        """The host waits: the gradients' memory is free, and their copies can be read."""
        if self._on:
            self._left.synchronize()


class Relay:
    """The model's layers work one after another on all micro batches of a step."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[_Layer],
        place: Place,
        settings: L2lSettings,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """`context`: what a forward pass runs in.  All parameters go to the host, buffers to the device."""
        self._blocks = [layer.unit for layer in layers if layer.unit is not None]
        self._place, self._settings, self._context = place, settings, context
        self._copies = _Copies(place)
        place.recorder.mark("init")
        self._home: dict[nn.Parameter, Tensor] = {}
        for p in module.parameters():
            self._home[p] = p.data = place.to_host(p.data)
        for buffer in module.buffers():
            buffer.data = place.to_device(buffer.data)
        front, *blocks, tail = layers
        self._order = [front, *blocks, tail, *blocks[::-1], front]
        self._turn = 0
        self._here: list[_Layer] = []
        self._grads_at_home: dict[nn.Parameter, Tensor] = {}
        self._leaving: list[Tensor] = []  # gradients on the device whose copies may be on their way
        self._stash: list[list[_Stash]] = []
        self._fronts: list[GradientEdge | None] = []  # where the graphs of what is before the blocks end; None: nothing trains
        self._tails: list[Tensor] = []  # inputs of what is behind them; their gradients come with its backward
        self._lockstep = Lockstep(self._blocks, self._in_thread)

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> tuple[float, ...]:
        """Forward and backward of all micro batches; every trained parameter then has its gradient on the host."""
        self._turn, self._stash, self._fronts, self._tails = -1, [], [], []
        self._next()
        self._mark("forward")
        found = self._lockstep.run([self._whole(loss) for loss in losses], self._forward)
        self._send_grads()
        grads = [leaf.grad for leaf in self._tails]
        self._tails.clear()
        for unit, stashed in zip(self._blocks[::-1], self._stash[::-1], strict=True):
            self._next()
            self._mark("backward")
            for lane in range(len(grads)):
                grads[lane] = self._backward(unit, stashed.pop(0), grads[lane])
            self._send_grads()
        self._next()
        self._mark("backward")
        for lane in range(len(grads)):
            grad, grads[lane] = grads[lane], None
            edge = self._fronts.pop(0)
            if edge is not None:
                torch.autograd.backward([edge], [grad])
            del grad, edge
        self._send_grads()
        self._drop([])
        self._let_go()
        for p, grad in self._grads_at_home.items():
            p.grad = grad
        self._grads_at_home.clear()
        return tuple(float(loss) for loss in found)

    def close(self) -> None:
        """Leaves the module as a plain one, on the host."""
        self._lockstep.remove()

    # -- compute -----------------------------------------------------------------------------------------------------------

    def _whole(self, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A micro batch from its inputs to the backward of what is behind the blocks."""

        def run() -> Tensor:
            with self._context():
                found = loss()
            self._mark("backward")
            found.backward()
            self._mark("forward")
            return found.detach()

        return run

    def _forward(self, unit: Unit, inputs: list[Inputs]) -> list[Any]:
        """A block, for all micro batches."""
        self._next()
        self._mark("forward")
        outputs, stashed = [], []
        while inputs:
            args, kwargs = inputs.pop(0)
            if any(isinstance(v, Tensor) and v.requires_grad for v in (*args[1:], *kwargs.values())):
                raise CannotTell(f"{unit.name} is given more than hidden states that carry a gradient")
            if not self._stash:
                self._fronts.append(get_gradient_edge(args[0]) if args[0].requires_grad else None)
            stashed.append(_Stash((args[0].detach(), *args[1:]), kwargs, self._random_state()))
            with torch.no_grad(), self._context():
                outputs.append(unit.forward(*args, **kwargs))
            if self._settings.stash == "host":
                stashed[-1].args = (self._place.to_host(args[0].detach()), *args[1:])
            del args, kwargs
        self._stash.append(stashed)
        if unit is self._blocks[-1]:
            self._tails = [_first(output).requires_grad_() for output in outputs]
            self._next()
            self._mark("forward")
        return outputs

    def _backward(self, unit: Unit, stash: _Stash, grad: Tensor | None) -> Tensor:
        leaf = self._place.to_device(stash.args[0]) if self._settings.stash == "host" else stash.args[0]
        leaf.requires_grad_()
        with self._same_random(stash.random), torch.enable_grad(), self._context():
            output = unit.forward(leaf, *stash.args[1:], **stash.kwargs)
        torch.autograd.backward(_first(output), grad)
        assert leaf.grad is not None
        return leaf.grad

    # -- weights and gradients ---------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """The next layer's turn: what is not wanted goes, what is missing comes."""
        self._turn += 1
        self._mark("upload")
        wanted = [self._order[0], *self._order[self._turn : self._turn + (2 if self._settings.overlap else 1)]]
        self._copies.computed()
        self._drop(wanted)
        for layer in wanted:
            if layer not in self._here:
                self._here.append(layer)
                with self._copies.uploading(layer):
                    for p in layer.params:
                        p.data = self._place.to_device(self._home[p])
        self._copies.arrive(self._order[self._turn])

    def _drop(self, wanted: Sequence[_Layer]) -> None:
        for layer in [layer for layer in self._here if layer not in wanted]:
            self._here.remove(layer)
            for p in layer.params:
                p.data = self._home[p]

    def _send_grads(self) -> None:
        """What all micro batches have added up in this layer goes home, while the next layer runs."""
        layer = self._order[self._turn]
        self._mark("offload")
        self._let_go()
        going = [p for p in layer.params if p.grad is not None]
        with self._copies.leaving():
            for p in going:
                assert p.grad is not None
                self._grads_at_home[p] = self._place.to_host(p.grad)
                self._leaving.append(p.grad)
                p.grad = None
        if not self._settings.overlap:
            self._let_go()

    def _let_go(self) -> None:
        """The gradients that left last are at home."""
        if self._leaving:
            self._copies.wait_for_leaving()
            self._leaving.clear()

    # -- small parts -------------------------------------------------------------------------------------------------------

    def _mark(self, kind: str) -> None:
        self._place.recorder.mark(kind, self._order[self._turn].name)

    def _random_state(self) -> Tensor:
        with self._place.recorder.tier(BOOKKEEPING):
            if self._place.device.type == "cuda":
                return torch.cuda.get_rng_state(self._place.device)
            return torch.get_rng_state()

    @contextlib.contextmanager
    def _same_random(self, state: Tensor) -> Iterator[None]:
        devices = [self._place.device] if self._place.device.type == "cuda" else []
        with self._place.recorder.tier(BOOKKEEPING):
            fork = torch.random.fork_rng(devices)
            fork.__enter__()
            if devices:
                torch.cuda.set_rng_state(state, self._place.device)
            else:
                torch.set_rng_state(state)
        try:
            yield
        finally:
            with self._place.recorder.tier(BOOKKEEPING):
                fork.__exit__(None, None, None)

    @contextlib.contextmanager
    def _in_thread(self) -> Iterator[None]:
        if self._place.device.type == "cuda":
            torch.cuda.set_device(self._place.device)  # a new thread begins on the first GPU
        with self._place.recorder.thread():
            yield


def _first(output: Any) -> Tensor:
    """The hidden states among a block's outputs."""
    found = output[0] if isinstance(output, tuple) else output
    if not isinstance(found, Tensor):
        raise CannotTell(f"a block returns {type(found).__name__}, not hidden states")
    return found
