"""The rules of optimizers that are not torch's own, against the libraries themselves on the CPU.

State: every storage that `optimizer.state` reaches after a step.  Transients: every block that `step()` makes and drops, seen
by a dispatch mode.  A test is skipped where its library is not installed.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from memplan.planner.ledger import Tier
from memplan.planner.optimizers.badam import blocks
from memplan.planner.optimizers.catalogue import entry_of, optimizer_rule
from memplan.planner.optimizers.flashoptim import AUTOTUNE_BUFFER, FlashOptim
from memplan.planner.optimizers.rule import OptimizerRule, OptimizerTensor, StepKind
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SCALARS = 64  # bytes of 0-dimensional results at one moment that rules leave out

# Odd sizes, a scalar, a vector, matrices wider and taller, one below and above the 4096 elements at which quantisation begins.
AWKWARD = ((3, 5), (7,), (), (1, 1, 129), (64, 65), (1,), (4095,), (4096,), (5, 1000), (64, 96))
MATRICES = ((48, 20), (20, 48), (33, 33), (7, 90), (90, 7))
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def needs(distribution: str) -> Any:
    """The library's module, or a skip."""
    return pytest.importorskip(distribution)


# -- what the real optimizer does ------------------------------------------------------------------------------------------


def parameters(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(getattr(torch, dtype))) for shape in shapes]


def give_gradients(params: Sequence[torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in params:
        if param.requires_grad:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def storages(value: Any, found: dict[int, torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
    """Storages of all tensors that `value` reaches through containers, attributes and tensor subclasses."""
    if isinstance(value, torch.Tensor):
        inner = getattr(value, "__tensor_flatten__", None)
        if inner is not None:
            for name in inner()[0]:
                storages(getattr(value, name), found)
        else:
            found[value.untyped_storage()._cdata] = value.untyped_storage()
    elif isinstance(value, dict):
        for item in value.values():
            storages(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            storages(item, found)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, types.FunctionType)):
        storages(vars(value), found)
    return found


def real_state_bytes(optimizer: torch.optim.Optimizer, *, counters: bool = False) -> int:
    """Bytes that `optimizer.state` holds; step counters (on the host on CUDA) only where they are asked for."""
    kept = [{k: v for k, v in state.items() if k != "step" or counters} for state in optimizer.state.values()]
    return sum(s.nbytes() for s in storages(kept, {}).values())


class Recorder(TorchDispatchMode):
    """Live bytes of the blocks that ops make, and their peak, from 0: what was there before counts when it goes."""

    def __init__(self, known: Sequence[Any]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}
        for storage in storages(list(known), {}).values():
            self._see(storage)
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.Tensor):
                self._see(result.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        nbytes = storage.nbytes()

        def died(_: Any) -> None:
            del self._seen[key]
            self.live -= nbytes

        self._seen[key] = weakref.ref(storage, died)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def recorded(step: Callable[[], Any], known: Callable[[], Any]) -> tuple[int, int]:
    """(peak, what is left) of one step, in bytes beyond what was there: what `known()` reaches.  No other holds gradients."""
    with Recorder(known()) as recorder:
        step()
    return recorder.peak, recorder.live


def own(events: Sequence[Any], tensors: Sequence[OptimizerTensor]) -> tuple[int, int]:
    """(peak, what is left) of a rule's step."""
    live = peak = 0
    sizes: dict[int, int] = {}
    for event in events:
        if event.kind in (StepKind.TEMP, StepKind.STATE):
            sizes[event.slot] = event.nbytes
            live += event.nbytes
        elif event.kind is StepKind.FREE:
            live -= sizes.pop(event.slot)
        elif event.kind is StepKind.DROP_GRAD:
            live -= tensors[event.tensor].nbytes
        peak = max(peak, live)
    return peak, live


def tensors_of(shapes: Sequence[tuple[int, ...]], dtype: str, names: Sequence[str] = ()) -> list[OptimizerTensor]:
    return [
        OptimizerTensor(tuple(shape), dtype, name=name, module_class="Linear")
        for shape, name in zip(shapes, names or [""] * len(shapes), strict=True)
    ]


def same_steps(
    rule: OptimizerRule, optimizer: Any, params: Sequence[torch.nn.Parameter], tensors: Sequence[OptimizerTensor]
) -> None:
    """State, and the peaks of the first and of a later step, of rule and library."""
    events = rule.step(tensors)

    def known() -> Any:
        return [params, [vars(p) for p in params], [p.grad for p in params], optimizer.state]

    give_gradients(params)
    first = recorded(optimizer.step, known)
    assert events.state_bytes == real_state_bytes(optimizer)
    for p in params:
        p.grad = None
    give_gradients(params)
    later = recorded(optimizer.step, known)
    assert events.state_bytes == real_state_bytes(optimizer)
    assert own(events.first, tensors)[0] == pytest.approx(first[0], abs=SCALARS + 12 * len(params))
    assert own(events.later, tensors)[0] == pytest.approx(later[0], abs=SCALARS + 12 * len(params))


# -- families --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_lion_is_that_of_its_library(dtype):
    library = needs("lion_pytorch")
    params = parameters(AWKWARD, dtype)
    same_steps(optimizer_rule("lion"), library.Lion(params), params, tensors_of(AWKWARD, dtype))


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("shapes", [AWKWARD, MATRICES, AWKWARD[::-1]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adafactor_of_transformers_is_that_of_its_library(dtype, shapes, momentum):
    from transformers.optimization import Adafactor

    params = parameters(shapes, dtype)
    optimizer = Adafactor(params, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9 if momentum else None)
    rule = optimizer_rule("hf-adafactor", options={"momentum": momentum})
    same_steps(rule, optimizer, params, tensors_of(shapes, dtype))


@pytest.mark.parametrize("kind", ["adamw", "radam", "sgd"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedule_free_optimizers_are_those_of_their_library(dtype, groups, kind):
    library = needs("schedulefree")
    params = parameters(AWKWARD, dtype)
    make = {"adamw": library.AdamWScheduleFree, "radam": library.RAdamScheduleFree, "sgd": library.SGDScheduleFree}[kind]
    optimizer = make([{"params": params[i::groups]} for i in range(groups)], lr=1e-3)
    optimizer.train()
    tensors = [OptimizerTensor(shape, dtype, i % groups) for i, shape in enumerate(AWKWARD)]
    rule = optimizer_rule(f"schedule-free-{kind}")
    if kind == "radam":
        give_gradients(params)
        peak, _ = recorded(optimizer.step, lambda: [params, [p.grad for p in params]])
        assert own(rule.step(tensors).first, tensors)[0] == pytest.approx(peak, abs=SCALARS)
        for group in optimizer.param_groups:
            group["k"] = 9  # past the steps without a denominator
        peak, _ = recorded(optimizer.step, lambda: [params, [p.grad for p in params], optimizer.state])
        assert own(rule.step(tensors).later, tensors)[0] == pytest.approx(peak, abs=SCALARS)
        assert rule.step(tensors).state_bytes == real_state_bytes(optimizer)
    else:
        same_steps(rule, optimizer, params, tensors)


@pytest.mark.parametrize("slice_p", [1, 11])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prodigy_is_that_of_its_library(dtype, slice_p):
    library = needs("prodigyopt")
    params = parameters(AWKWARD, dtype)
    optimizer = library.Prodigy(params, slice_p=slice_p)
    rule = optimizer_rule("prodigy", options={"slice_p": slice_p})
    same_steps(rule, optimizer, params, tensors_of(AWKWARD, dtype))


@pytest.mark.parametrize("kahan", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stable_adamw_keeps_what_its_rule_says(dtype, kahan, monkeypatch):
    needs("optimi.stableadamw")
    module = sys.modules["optimi.stableadamw"]
    monkeypatch.setattr(module, "stableadamw", lambda **_: None)  # the kernels; state is made before
    params = parameters(AWKWARD, dtype)
    optimizer = module.StableAdamW(params, lr=1e-3, triton=True, kahan_sum=kahan)
    give_gradients(params)
    optimizer.step()
    rule = optimizer_rule("stable-adamw", options={"kahan_sum": kahan})
    assert rule.step(tensors_of(AWKWARD, dtype)).state_bytes == real_state_bytes(optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grokadamw_keeps_its_states_on_the_host(dtype, monkeypatch):
    library = needs("grokadamw.grokadamw")
    monkeypatch.setattr(library, "autocast", contextlib.nullcontext)

    def to(self: torch.Tensor, where: Any, **_: Any) -> torch.Tensor:
        """On a GPU `state.to(p.device)` is a copy there, and `.to("cpu")` one on the host, which is not counted."""
        if isinstance(where, torch.device):
            return self.clone()
        with _disable_current_modes():
            return self.clone()

    params = parameters(AWKWARD, dtype)
    optimizer = library.GrokAdamW(params, gradient_clipping=0.0)
    events = optimizer_rule("grokadamw").step(tensors_of(AWKWARD, dtype))
    give_gradients(params)
    optimizer.step()
    states = [g["state"] for g in optimizer.param_groups]
    found = storages([{k: v for k, v in s.items() if k != "step"} for g in states for s in g.values()], {})
    assert events.state_bytes_in(Tier.HOST_PAGEABLE) == events.state_bytes == sum(s.nbytes() for s in found.values())
    monkeypatch.setattr(torch.Tensor, "to", to)
    peak, _ = recorded(optimizer.step, lambda: [params, [p.grad for p in params]])
    assert own(events.later, tensors_of(AWKWARD, dtype))[0] == pytest.approx(peak, abs=SCALARS)


_BNB = {
    "adam": "Adam",
    "adamw": "AdamW",
    "lamb": "LAMB",
    "ademamix": "AdEMAMix",
    "lion": "Lion",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "lars": "LARS",
}


def bnb_optimizer(kind: str, bits: int, params: Any) -> torch.optim.Optimizer:
    library = needs("bitsandbytes")
    arguments: dict[str, Any] = {"lr": 1e-3}
    if kind in ("sgd", "lars"):
        arguments["momentum"] = 0.9
    if kind == "ademamix":  # the class AdEMAMix32bit has no room for its second average, and its step fails
        return library.optim.AdEMAMix(params, optim_bits=bits, **arguments)
    return getattr(library.optim, f"{_BNB[kind]}{bits}bit")(params, **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", _BNB)
def test_bitsandbytes_keeps_what_its_rule_says(kind, bits, dtype):
    params = parameters(AWKWARD, dtype)
    optimizer = bnb_optimizer(kind, bits, params)
    for _ in range(2):
        give_gradients(params)
        optimizer.step()
    rule = optimizer_rule(f"{kind}-{bits}bit")
    assert rule.step(tensors_of(AWKWARD, dtype)).state_bytes == real_state_bytes(optimizer)


def test_bitsandbytes_keeps_a_larger_share_at_32_bits_where_the_smallest_size_says_so():
    library = needs("bitsandbytes")
    params = parameters(AWKWARD, "float32")
    optimizer = library.optim.AdamW8bit(params, min_8bit_size=6000)
    give_gradients(params)
    optimizer.step()
    rule = optimizer_rule("adamw-8bit:min_8bit_size=6000")
    assert rule.step(tensors_of(AWKWARD, "float32")).state_bytes == real_state_bytes(optimizer)


def test_embeddings_at_32_bits_are_as_transformers_trainer_makes_them():
    library = needs("bitsandbytes")
    model = torch.nn.Sequential(torch.nn.Embedding(300, 40), torch.nn.Linear(40, 300, bias=False))
    manager = library.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    try:
        optimizer = library.optim.AdamW8bit(model.parameters())
        give_gradients(list(model.parameters()))
        optimizer.step()
    finally:  # it is one for the process, and knows parameters by position and id: the next optimizer would be overridden too
        manager.initialize()
    tensors = [
        OptimizerTensor((300, 40), "float32", name="0.weight", module_class="Embedding"),
        OptimizerTensor((300, 40), "float32", name="1.weight", module_class="Linear"),
    ]
    events = optimizer_rule("adamw-8bit:embeddings=32").step(tensors)
    assert events.state_bytes == real_state_bytes(optimizer)
    assert events.state_bytes - optimizer_rule("adamw-8bit").step(tensors).state_bytes == 2 * (4 * 12_000 - 12_000 - 4 * 47)


def test_a_paged_optimizer_keeps_its_large_states_in_managed_memory():
    # bitsandbytes/optim/optimizer.py, get_state_buffer: 1e5 elements; absmax and code books are not paged
    large, small = OptimizerTensor((1000, 100), "bfloat16"), OptimizerTensor((999, 100), "bfloat16")
    events = optimizer_rule("paged-adamw-8bit").step([large, small])
    assert events.state_bytes_in(Tier.GPU_MANAGED) == 2 * 100_000
    assert events.state_bytes_in(Tier.GPU) == 2 * 99_900 + 2 * 4 * (391 + 391) + 2 * 1024
    assert events.state_bytes == optimizer_rule("adamw-8bit").step([large, small]).state_bytes


@pytest.mark.parametrize("block_size", [None, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_torchao_keeps_what_its_rule_says(kind, form, dtype, block_size, monkeypatch):
    needs("torchao")
    import torchao.optim

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the state is made before, and needs no kernel
    name = {"8bit": f"{kind}8bit", "4bit": f"{kind}4bit", "fp8": f"{kind}Fp8"}[form]
    params = parameters(AWKWARD, dtype)
    how = {} if block_size is None else {"block_size": block_size}
    optimizer = getattr(torchao.optim, name)(params, **how)
    give_gradients(params)
    optimizer.step()
    rule = optimizer_rule(f"torchao-{kind.lower()}-{form}", options=how)
    assert rule.step(tensors_of(AWKWARD, dtype)).state_bytes == real_state_bytes(optimizer)


@pytest.mark.parametrize("shapes", [MATRICES, MATRICES[::-1]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_muon_of_torch_is_that_of_its_rule(dtype, shapes):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    params = parameters(shapes, dtype)
    same_steps(optimizer_rule("muon", target="cpu"), torch.optim.Muon(params), params, tensors_of(shapes, dtype))


class Together:
    """Two optimizers stepped one after the other, as Muon's documentation has it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    @property
    def state(self) -> dict[Any, Any]:
        return {k: v for optimizer in self.optimizers for k, v in optimizer.state.items()}


def test_muon_leaves_embedding_head_norm_and_bias_to_adamw():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    shapes = ((50, 16), (16, 32), (32,), (16,), (50, 16))
    names = ("model.embed_tokens.weight", "layers.0.mlp.weight", "layers.0.mlp.bias", "norm.weight", "lm_head.weight")
    params = parameters(shapes, "bfloat16")
    optimizer = Together(torch.optim.Muon([params[1]]), torch.optim.AdamW([params[i] for i in (0, 2, 3, 4)], foreach=True))
    same_steps(optimizer_rule("muon"), optimizer, params, tensors_of(shapes, "bfloat16", names))


_MINI = {
    "model.embed_tokens.weight": (50, 32),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.q_proj.bias": (32,),
    "layers.0.self_attn.o_proj.weight": (32, 32),
    "layers.0.mlp.up_proj.weight": (77, 32),
    "layers.0.mlp.down_proj.weight": (32, 77),
    "norm.weight": (32,),
    "rotary.scale": (),
    "conv.weight": (4, 3, 5),
    "lm_head.weight": (50, 32),
}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adam_mini_is_that_of_its_library(dtype, backwards):
    library = needs("adam_mini")
    items = list(_MINI.items())[:: -1 if backwards else 1]
    names, shapes = [n for n, _ in items], [s for _, s in items]
    params = parameters(shapes, dtype)
    optimizer = library.Adam_mini(zip(names, params, strict=True), dim=32, n_heads=4, n_kv_heads=2, verbose=False)
    rule = optimizer_rule("adam-mini:dim=32,n_heads=4")
    same_steps(rule, optimizer, params, tensors_of(shapes, dtype, names))


# -- low-rank gradients ----------------------------------------------------------------------------------------------------

_LOW = {
    "embed_tokens.weight": (40, 24),
    "layers.0.attn.q.weight": (64, 24),
    "layers.0.attn.k.weight": (24, 64),
    "layers.0.mlp.up.weight": (48, 48),
    "layers.0.mlp.bias": (48,),
    "norm.weight": (24,),
    "layers.1.mlp.up.weight": (3, 50),
}


def low_rank_groups(params: Sequence[torch.nn.Parameter], **arguments: Any) -> list[dict[str, Any]]:
    chosen = [("attn" in n or "mlp" in n) and len(s) == 2 for n, s in _LOW.items()]
    plain = [p for p, c in zip(params, chosen, strict=True) if not c]
    low = [p for p, c in zip(params, chosen, strict=True) if c]
    return [{"params": plain}, {"params": low, "update_proj_gap": 1, "proj_type": "std", "scale": 0.25, **arguments}]


def low_rank_tensors(dtype: str) -> list[OptimizerTensor]:
    return [OptimizerTensor(s, dtype, name=n, module_class="Embedding" if "embed" in n else "Linear") for n, s in _LOW.items()]


def same_low_rank(rule: OptimizerRule, optimizer: Any, params: Sequence[torch.nn.Parameter], dtype: str, *, copy: int) -> None:
    """As `same_steps`; `copy` is what the rule has beside the ops: the solver's own copy of the largest matrix."""
    tensors = low_rank_tensors(dtype)
    events = rule.step(tensors)
    for part in ("first", "later"):
        for p in params:
            p.grad = None
        give_gradients(params)
        peak, _ = recorded(
            optimizer.step, lambda: [params, [vars(p) for p in params], [p.grad for p in params], optimizer.state]
        )
        assert events.state_bytes == real_state_bytes(optimizer)
        predicted = own(getattr(events, part), tensors)[0]
        slack = SCALARS + 12 * len(params)
        assert peak - slack <= predicted <= peak + copy + slack


@pytest.mark.parametrize("rank", [1, 4, 24, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_galore_is_that_of_its_library(dtype, rank):
    library = needs("galore_torch")
    params = parameters(list(_LOW.values()), dtype)
    optimizer = library.GaLoreAdamW(low_rank_groups(params, rank=rank), no_deprecation_warning=True)
    rule = optimizer_rule("galore-adamw", options={"rank": rank})
    same_low_rank(rule, optimizer, params, dtype, copy=4 * 48 * 48)


@pytest.mark.parametrize("rank", [4, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_galore_adafactor_is_that_of_its_library(dtype, rank):
    library = needs("galore_torch")
    params = parameters(list(_LOW.values()), dtype)
    optimizer = library.GaLoreAdafactor(low_rank_groups(params, rank=rank), lr=1e-3, relative_step=False, scale_parameter=False)
    rule = optimizer_rule("galore-adafactor", options={"rank": rank})
    same_low_rank(rule, optimizer, params, dtype, copy=4 * 48 * 48)


@pytest.mark.parametrize("rank", [4, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_galore_with_8_bit_states_keeps_what_its_rule_says(dtype, rank, monkeypatch):
    library = needs("galore_torch")
    needs("bitsandbytes")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    shapes = {**_LOW, "layers.2.mlp.wide.weight": (50, 3000), "head.weight": (50, 100)}
    params = parameters(list(shapes.values()), dtype)
    groups = low_rank_groups(params[: len(_LOW)], rank=rank)
    groups[1]["params"].append(params[-2])
    groups[0]["params"].append(params[-1])
    optimizer = library.GaLoreAdamW8bit(groups)
    give_gradients(params)
    optimizer.step()
    rule = optimizer_rule("galore-adamw-8bit", options={"rank": rank})
    tensors = [
        *low_rank_tensors(dtype),
        *(OptimizerTensor(s, dtype, name=n, module_class="Linear") for n, s in list(shapes.items())[len(_LOW) :]),
    ]
    assert rule.step(tensors).state_bytes == real_state_bytes(optimizer)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
@pytest.mark.parametrize("rank", [1, 4, 60])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_apollo_is_that_of_its_library(dtype, rank, scale_type):
    library = needs("apollo_torch")
    params = parameters(list(_LOW.values()), dtype)
    optimizer = library.APOLLOAdamW(low_rank_groups(params, rank=rank, proj="random", scale_type=scale_type))
    rule = optimizer_rule("apollo-adamw", options={"rank": rank, "scale_type": scale_type})
    same_low_rank(rule, optimizer, params, dtype, copy=0)


def test_apollo_mini_is_rank_one_with_one_scale():
    tensors = low_rank_tensors("bfloat16")
    options = {"rank": 1, "scale_type": "tensor"}
    assert optimizer_rule("apollo-mini").step(tensors) == optimizer_rule("apollo-adamw", options=options).step(tensors)


# -- a real model ----------------------------------------------------------------------------------------------------------


def real_model(dtype: torch.dtype) -> torch.nn.Module:
    """A GPT-2 of one layer: head and embedding tied, the first norm and the positions frozen."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=3, n_embd=51, vocab_size=211, n_positions=37, attn_implementation="eager")
    model = GPT2LMHeadModel(config).to(dtype)
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[0].ln_1.requires_grad_(False)
    return model


_LIBRARIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "lion": ("lion_pytorch", lambda p: sys.modules["lion_pytorch"].Lion(p)),
    "hf-adafactor": ("transformers.optimization", lambda p: sys.modules["transformers.optimization"].Adafactor(p)),
    "adamw-8bit": ("bitsandbytes", lambda p: sys.modules["bitsandbytes"].optim.AdamW8bit(p)),
    "paged-lion-8bit": ("bitsandbytes", lambda p: sys.modules["bitsandbytes"].optim.PagedLion8bit(p)),
    "ademamix-8bit": ("bitsandbytes", lambda p: sys.modules["bitsandbytes"].optim.AdEMAMix8bit(p)),
    "torchao-adamw-8bit": ("torchao.optim", lambda p: sys.modules["torchao.optim"].AdamW8bit(p)),
    "torchao-adamw-4bit": ("torchao.optim", lambda p: sys.modules["torchao.optim"].AdamW4bit(p)),
    "flash-adamw": ("flashoptim", lambda p: sys.modules["flashoptim"].FlashAdamW(p)),
}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _LIBRARIES)
def test_a_real_model_with_tied_and_frozen_weights_has_the_state_of_the_rule(name, dtype, monkeypatch, request):
    if name == "flash-adamw":
        if dtype == "float32":
            pytest.skip("FlashOptim refuses it")
        request.getfixturevalue("flash")
    module, make = _LIBRARIES[name]
    needs(module)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = real_model(getattr(torch, dtype))
    optimizer = make(list(model.parameters()))
    ids = torch.arange(30).reshape(2, 15)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = [
        OptimizerTensor(tuple(p.shape), dtype, name=n, module_class="Linear")
        for n, p in model.named_parameters()  # a shared tensor has one name
        if p.requires_grad
    ]
    assert optimizer_rule(name).step(tensors).state_bytes == real_state_bytes(optimizer)


# -- one block, or one parameter, at a time --------------------------------------------------------------------------------

_LAYERS = {
    "model.embed_tokens.weight": (30, 8),
    "model.layers.0.q.weight": (8, 8),
    "model.layers.0.mlp.weight": (40, 8),
    "model.layers.0.mlp.bias": (40,),
    "model.layers.1.q.weight": (8, 8),
    "model.layers.1.mlp.weight": (40, 8),
    "model.layers.1.mlp.bias": (40,),
    "model.norm.weight": (8,),
    "lm_head.weight": (30, 8),
}


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_badam_divides_a_model_into_the_blocks_that_its_library_makes(embedding, head):
    library = needs("badam")
    params = parameters(list(_LAYERS.values()), "bfloat16")
    named = list(zip(_LAYERS, params, strict=True))
    found = blocks(list(_LAYERS), include_embedding=embedding, include_lm_head=head)
    for number, names in enumerate(found):
        library.BlockOptimizer(
            torch.optim.AdamW(params),
            named,
            start_block=number,
            switch_mode="fixed",
            include_embedding=embedding,
            include_lm_head=head,
            verbose=0,
        )
        assert [n for n, p in named if p.requires_grad] == names
    assert len(found) == 2 + embedding + head


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_badam_is_that_of_its_library(dtype):
    library = needs("badam")
    params = parameters(list(_LAYERS.values()), dtype)
    named = list(zip(_LAYERS, params, strict=True))
    made: list[Any] = []

    def build() -> None:
        base = torch.optim.AdamW(params, foreach=True)
        made.append(library.BlockOptimizer(base, named, switch_mode="ascending", switch_block_every=3, verbose=0))

    init = recorded(build, lambda: params)[1]
    (optimizer,) = made

    def held() -> Any:
        return [params, [p.grad for p in params], optimizer.param_idx2hp, optimizer.base_optimizer]

    names = blocks(list(_LAYERS))[0]
    tensors = [OptimizerTensor(_LAYERS[n], dtype, name=n) for n in names]
    events = optimizer_rule("badam").step(tensors)
    assert own(events.init, tensors)[1] == init == sum(4 * t.numel for t in tensors)
    peaks = []
    for _ in range(2):  # the block is switched after step 2: global_step + 1 is a multiple of 3
        give_gradients(params)
        kept = [{k: v for k, v in s.items() if k != "step"} for s in optimizer.base_optimizer.state.values()]
        if kept:
            assert events.state_bytes == sum(
                s.nbytes() for s in storages([kept, list(optimizer.param_idx2hp.values())], {}).values()
            )
        kept.clear()
        peaks.append(recorded(optimizer.step, held)[0])
    assert own(events.first, tensors)[0] == pytest.approx(peaks[0], abs=SCALARS + 8 * len(tensors))
    assert own(events.later, tensors)[0] == pytest.approx(peaks[1], abs=SCALARS + 8 * len(tensors))


def model_of(shapes: dict[str, tuple[int, ...]], dtype: str) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, param in zip(shapes, parameters(list(shapes.values()), dtype), strict=True):
        model.register_parameter(name.replace(".", "_"), param)
    return model


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lomo_and_adalomo_are_those_of_their_library(name, dtype, backwards, monkeypatch):
    library = needs("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    shapes = {"a.w": (48, 20), "b": (7,), "c.w": (20, 48), "d.w": (3, 5), "e": (900,)}
    if backwards:
        shapes = dict(reversed(shapes.items()))
    model = model_of(shapes, dtype)
    optimizer = (library.Lomo if name == "lomo" else library.AdaLomo)(model, lr=1e-3)
    optimizer.step_num = 1
    params = list(model.parameters())
    tensors = tensors_of(list(shapes.values()), dtype)
    events = optimizer_rule(name).step(tensors)
    factors = [getattr(optimizer, k, {}) for k in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")]
    assert events.state_bytes == sum(s.nbytes() for s in storages(factors, {}).values())
    for part in (events.first, events.later):
        give_gradients(params)
        peak, left = recorded(lambda: optimizer.grad_func(0), lambda: [params, [p.grad for p in params], factors])
        assert own(part, tensors)[0] == pytest.approx(peak, abs=SCALARS)
        assert own(part, tensors)[1] == left == -sum(t.nbytes for t in tensors)


# -- the host --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeeds_adam_on_the_host_keeps_what_its_rule_says(dtype, wide, monkeypatch):
    needs("deepspeed")
    from deepspeed.ops.adam import cpu_adam

    kernel = types.SimpleNamespace(create_adam=lambda *_: 0, adam_update=lambda *_: 0, destroy_adam=lambda *_: 0)
    monkeypatch.setattr(cpu_adam, "CPUAdamBuilder", lambda: types.SimpleNamespace(load=lambda: kernel))
    params = parameters(AWKWARD, dtype)
    optimizer = cpu_adam.DeepSpeedCPUAdam(params, fp32_optimizer_states=wide)
    give_gradients(params)
    optimizer.step()
    rule = optimizer_rule("deepspeed-cpu-adam", options={"fp32_optimizer_states": wide})
    events = rule.step(tensors_of(AWKWARD, dtype))
    assert events.state_bytes_in(Tier.HOST_PAGEABLE) == events.state_bytes == real_state_bytes(optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchaos_offload_keeps_copies_of_parameter_and_gradient_on_the_host(dtype, monkeypatch):
    needs("torchao")
    from torchao.optim import cpu_offload

    class Stream:
        def wait_stream(self, _: Any) -> None: ...
        def synchronize(self) -> None: ...
        def record_event(self) -> Any:
            return Stream()

    pinned: list[int] = []
    empty_like = torch.empty_like

    def unpinned(tensor: torch.Tensor, *, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        if pin_memory:
            pinned.append(tensor.nbytes)
        return empty_like(tensor, **how)

    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"])
    for name, value in {"Stream": Stream, "current_stream": Stream, "stream": lambda _: contextlib.nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    params = parameters(AWKWARD, dtype)
    monkeypatch.setattr(torch, "empty_like", unpinned)
    optimizer = cpu_offload.CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True)
    sum(p.float().sum() for p in params).backward()
    optimizer.step()
    events = optimizer_rule("torchao-cpu-offload").step(tensors_of(AWKWARD, dtype))
    host = [state for inner in optimizer.optim_dict.values() for state in inner.state.values()]
    assert events.state_bytes_in(Tier.HOST_PINNED) == sum(pinned)
    assert events.state_bytes_in(Tier.HOST_PAGEABLE) == sum(s.nbytes() for s in storages(host, {}).values())
    assert events.state_bytes_in(Tier.GPU) == real_state_bytes(optimizer.d_opt, counters=True)


# -- FlashOptim ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def flash(monkeypatch) -> Any:
    """The library with its kernels taken out: what they read and write is allocated by its Python code, which is all there.

    It asks for a GPU in three places, and Triton's kernels are launched by subscription.
    """
    pytest.importorskip("triton")
    library = needs("flashoptim.optimizers")

    class NoKernel:
        def __getitem__(self, _: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    for name in (
        "_triton_momentum_kernel",
        "_triton_adam_kernel",
        "_triton_dequantize_kernel",
        "_triton_quantize_kernel",
        "_reconstruct_fp32_kernel",
        "_compute_ecc_bits_kernel",
    ):
        monkeypatch.setattr(library, name, NoKernel())
    monkeypatch.setattr(library, "_get_sm_count", lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_data = library._MaybeQuantizedTensor.set_data

    class OnCuda:  # a tensor that says it is on a GPU, to `set_data` only
        is_cuda = True

        def __init__(self, data: torch.Tensor) -> None:
            self.data = data

        def __getattr__(self, name: str) -> Any:
            return getattr(self.data, name)

    quantize = library.quantize
    monkeypatch.setattr(library, "quantize", lambda data, **how: quantize(getattr(data, "data", data), **how))
    monkeypatch.setattr(
        library._MaybeQuantizedTensor,
        "set_data",
        lambda self, data: set_data(self, OnCuda(data) if self._try_quantize else data),
    )
    return library


_FLASH = {
    "flash-adamw": ("FlashAdamW", {}),
    "flash-adam": ("FlashAdam", {}),
    "flash-lion": ("FlashLion", {}),
    "flash-sgd-momentum": ("FlashSGD", {"momentum": 0.9}),
    "flash-sgd": ("FlashSGD", {}),
}


def flash_pair(flash: Any, name: str, dtype: str, **options: Any) -> tuple[FlashOptim, Any, list[torch.nn.Parameter]]:
    class_name, arguments = _FLASH[name]
    params = parameters(AWKWARD, dtype)
    if dtype == "float32":
        options["master_weight_bits"] = None
    rule = optimizer_rule(name, options={k: v for k, v in options.items() if k in entry_of(name).options})
    assert isinstance(rule, FlashOptim)
    return rule, getattr(flash, class_name)(params, **arguments, **options), params


@pytest.mark.filterwarnings("ignore:master_weight_bits=None")
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bits", [None, 24, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", _FLASH)
def test_flashoptim_is_that_of_its_library(flash, name, dtype, bits, fused, quantize):
    options: dict[str, Any] = {"master_weight_bits": bits, "fused": fused, "quantize": quantize}
    rule, optimizer, params = flash_pair(flash, name, dtype, **options)
    tensors = tensors_of(AWKWARD, dtype)
    events = rule.step(tensors)
    for part in (events.first, events.later):
        for p in params:
            p.grad = None
        give_gradients(params)
        peak, _ = recorded(
            optimizer.step, lambda: [params, [vars(p) for p in params], [p.grad for p in params], optimizer.state]
        )
        assert events.state_bytes == real_state_bytes(optimizer)
        without_tuning = [e for e in part if e.nbytes != AUTOTUNE_BUFFER]
        gone = {e.slot for e in part if e.nbytes == AUTOTUNE_BUFFER}
        without_tuning = [e for e in without_tuning if e.slot not in gone]
        assert own(without_tuning, tensors)[0] == pytest.approx(peak, abs=SCALARS + 8 * len(params))


@pytest.mark.filterwarnings("ignore:master_weight_bits=None")
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("bits", [None, 24, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", _FLASH)
def test_a_checkpoint_of_flashoptim_is_as_large_as_its_rule_says(flash, name, dtype, bits, compress):
    rule, optimizer, params = flash_pair(flash, name, dtype, master_weight_bits=bits, compress_state_dict=compress)
    give_gradients(params)
    optimizer.step()
    saved = [{k: v for k, v in s.items() if k != "step"} for s in optimizer.state_dict()["state"].values()]
    assert rule.checkpoint_bytes(tensors_of(AWKWARD, dtype), compress=compress) == sum(
        s.nbytes() for s in storages(saved, {}).values()
    )


def test_flashoptim_refuses_an_all_fp32_model_as_its_rule_does(flash):
    from memplan.errors import UserError

    params = parameters([(8, 8)], "float32")
    with pytest.raises(ValueError, match="has no effect"):
        flash.FlashAdamW(params)
    with pytest.raises(UserError, match="does nothing for fp32 parameters"):
        optimizer_rule("flash-adamw").step(tensors_of([(8, 8)], "float32"))


def test_frozen_parameters_have_no_state_in_flashoptim(flash):
    params = parameters(AWKWARD, "bfloat16")
    for p in params[::2]:
        p.requires_grad_(False)
    optimizer = flash.FlashAdamW(params)
    give_gradients(params)
    optimizer.step()
    trained = [s for s, p in zip(AWKWARD, params, strict=True) if p.requires_grad]
    assert optimizer_rule("flash-adamw").step(tensors_of(trained, "bfloat16")).state_bytes == real_state_bytes(optimizer)
