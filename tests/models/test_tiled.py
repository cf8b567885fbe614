"""Tiles of tokens: right values and gradients, the memory that DeepSpeed's own TiledMLP takes, and the fused head and loss."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from memplan.errors import UserError
from memplan.models.tiled import _TiledMLP, chunk_of, fused_linear_cross_entropy, tile_mlps, tiled_loss
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, WIDTH, WORDS = 40, 16, 100


class Live(TorchDispatchMode):
    """Bytes of what ops make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):
            return out
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in self._seen:
                self.see(result.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def died(_: Any) -> None:
            del self._seen[key]
            self.live -= nbytes

        self._seen[key] = weakref.ref(storage, died)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_loss_and_its_gradients_are_those_of_cross_entropy(bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, dtype=torch.float64), torch.randn(WORDS, WIDTH, dtype=torch.float64)
    shift = torch.randn(WORDS, dtype=torch.float64) if bias else None
    labels = torch.randint(WORDS, (TOKENS,))
    labels[::7] = -100
    found = []
    for fused in (True, False):
        given = [t.clone().requires_grad_() for t in (hidden, weight, shift) if t is not None]
        if fused:
            loss = fused_linear_cross_entropy(given[0], given[1], labels, given[2] if bias else None)
        else:
            logits = torch.nn.functional.linear(given[0], given[1], given[2] if bias else None)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        (loss * 3).backward()
        found.append([loss.detach().double(), *(t.grad for t in given)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "words", "width", "chunk"),
    [(16384, 32000, 4096, 2048), (2048, 128256, 2048, 64), (40, 100, 16, 8), (5, 10, 20, 5), (1, 100, 10, 1)],
)
def test_a_chunk_is_a_power_of_two_of_about_as_many_logits_as_hidden_states(tokens, words, width, chunk):
    """The first line is the example in the comments of liger_kernel/ops/fused_linear_cross_entropy.py."""
    assert chunk_of(tokens, words, width) == chunk


def test_both_gradients_exist_before_backward_and_the_logits_never_do():
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(WORDS, (TOKENS,))
    watch = Live()
    with watch:
        loss = fused_linear_cross_entropy(hidden, weight, labels)
    held = TOKENS * WIDTH * 2 + WORDS * WIDTH * 2
    assert held <= watch.live <= held + 64
    row = WORDS * 4 * 4  # of the loss of one row, which a kernel makes nowhere
    room = chunk_of(TOKENS, WORDS, WIDTH) * WORDS * 2 + TOKENS * (4 + 1)
    assert held + room <= watch.peak <= held + room + row + 256
    assert loss.requires_grad


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 8 * WIDTH), torch.nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def stepped(run: Any) -> tuple[int, int, list[torch.Tensor]]:
    """(peak of forward, peak of forward and backward, output and gradients)."""
    torch.manual_seed(0)
    part, x = MLP(), torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    watch = Live()
    with watch:
        out = run(part, x * 1)
        forward = watch.peak
        out.backward(torch.ones_like(out))
    return forward, watch.peak, [out.detach(), *(p.grad for p in (x, *part.parameters()))]  # type: ignore[misc]


@pytest.mark.parametrize("tiles", [1, 3, 4])
def test_a_tiled_mlp_takes_what_deepspeeds_takes_and_computes_the_same(tiles):
    library = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")

    def theirs(part: MLP, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = library.TiledMLP.apply(MLP.forward, part, x, tiles, list(part.parameters()))
        return out

    def ours(part: MLP, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _TiledMLP.apply(MLP.forward, part, x, tiles)
        return out

    *peaks, values = stepped(ours)
    *real_peaks, real_values = stepped(theirs)
    assert peaks == real_peaks
    for one, other in zip(values, real_values, strict=True):
        torch.testing.assert_close(one, other)
    plain = stepped(lambda part, x: part(x))
    for one, other in zip(values, plain[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if tiles > 1:
        assert peaks[1] < plain[1]


@pytest.mark.parametrize("tiles", [1, 3, 4])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_tiled_loss_takes_what_deepspeeds_takes_and_computes_the_same(tiles, frozen):
    library = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")

    def run(loss: Any) -> tuple[int, int, list[Any]]:
        torch.manual_seed(0)
        head, x = torch.nn.Linear(WIDTH, WORDS, bias=False), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        head.requires_grad_(not frozen)
        labels = torch.randint(WORDS, (1, TOKENS))
        watch = Live()
        with watch:
            out = loss(head, x * 1, labels)
            held = watch.live
            out.backward()
        return watch.peak, held, [out.detach(), x.grad, head.weight.grad]

    def of_tile(head: torch.nn.Linear, tile: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(tile), labels, reduction="sum") / TOKENS

    def theirs(head: torch.nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = list(head.parameters())
        out: torch.Tensor = library.TiledFusedLogitsLoss.apply(of_tile, head, x, labels, None, tiles, weights, "sum")
        return out

    def ours(head: torch.nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return tiled_loss(lambda tile, some: of_tile(head, tile, some), x.flatten(0, 1), labels.flatten(), tiles)

    def plain(head: torch.nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return of_tile(head, x.flatten(0, 1), labels.flatten())

    *peaks, values = run(ours)
    *real_peaks, real_values = run(theirs)
    assert peaks == real_peaks
    for one, other in zip([*real_values, *run(plain)[2]], 2 * values, strict=True):
        if frozen and one is None:
            assert other is None
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_every_mlp_is_tiled_and_a_model_without_one_is_an_error():
    model = torch.nn.Sequential(MLP(), torch.nn.Linear(WIDTH, WIDTH), MLP())
    assert tile_mlps(model, 2) == 2
    assert model(torch.randn(2, TOKENS, WIDTH)).shape == (2, TOKENS, WIDTH)
    with pytest.raises(UserError, match="no module whose class is called an MLP"):
        tile_mlps(torch.nn.Linear(2, 2), 2)
