"""`build`: a `ModelSpec` becomes a module with random weights, an example batch and a step.

The same call serves the tracer (under FakeTensorMode: no memory is touched) and a real run. No weights are read or fetched.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import batch as batches
from . import tasks
from .built import BuiltModel
from .from_factory import build_from_factory
from .spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


def build(spec: ModelSpec, *, dtype: torch.dtype, attention: str = "sdpa") -> BuiltModel:
    """Makes `spec`'s module with parameters in `dtype`, on the default device, in train mode.

    `attention`: sdpa | eager | flash_attention_2; where the model (or this machine) cannot, another is taken and noted.
    Raises UserError for a config that the family refuses and for a factory that fails.
    """
    if attention not in ATTENTIONS:
        raise UserError(f"attention: {attention!r} is not known", f"Choose one of {', '.join(ATTENTIONS)}")
    if spec.factory is not None:
        return build_from_factory(spec, spec.factory, dtype, attention)
    return _from_config(spec, dtype, attention)


def _from_config(spec: ModelSpec, dtype: torch.dtype, attention: str) -> BuiltModel:
    notes = list(spec.notes)
    config = make_config(spec)
    if spec.task == "seq-classification" and _pad_token_id(config) is None:
        text = config.get_text_config()
        config.pad_token_id = text.pad_token_id = 0  # without one, a decoder classifies batches of one sample only
        notes.append("pad_token_id is set to 0: a decoder needs one to find each sequence's last token")
    if spec.task == "seq-classification" and config.problem_type is None:
        # what transformers concludes from the first labels that it sees
        config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = next(
            (i for i in (_pad_token_id(config), getattr(config, "bos_token_id", None)) if i is not None), 0
        )
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, key, 0):
            setattr(config, key, 0.0)
            notes.append(f"{key} is 0: a step that happens to skip no layer is the one that must fit")
    if spec.task == "ctc" and getattr(config, "apply_spec_augment", False):
        config.apply_spec_augment = False
        notes.append("SpecAugment is off: where it masks depends on random values, and it keeps next to nothing")
    if config.architectures is None:
        config.architectures = []  # an auto class with several candidates (DeiT, LeViT) goes through them
    cls = model_class(spec, config)
    module, used = _instantiate(cls, config, {"dtype": dtype, **_trust(spec, cls)}, attention, notes)
    _untie_head(module, spec)
    _restore_fp32(module, dtype)
    if spec.task == "causal-lm" and getattr(module, "loss_type", "") is None:
        module.loss_type = "ForCausalLM"  # what transformers takes anyway (GPT2LMHeadModel), without its warning
    module.train()
    count = num_params(module)
    if spec.num_params is not None and spec.num_params != count and spec.source != "catalogue":
        notes.append(f"the weights' index states {spec.num_params:,} parameters, the config builds {count:,}")
    inputs = batches.Inputs(config=config, task=spec.task, module=module, dtype=dtype)
    notes += inputs.notes
    return BuiltModel(module=module, make_batch=inputs.make, step=inputs.step, attention=used, notes=notes)


def num_params(module: nn.Module) -> int:
    """Parameters of `module`, a tied weight counted once."""
    return sum(p.numel() for p in module.parameters())


def make_config(spec: ModelSpec) -> Any:
    """transformers' config object of `spec`; UserError where the family refuses a value."""
    from .late import import_transformers

    import_transformers()
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = copy.deepcopy(spec.config or {})
    for key in ("quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "_attn_implementation"):
        values.pop(key, None)  # how the checkpoint is stored; the run decides that itself
    model_type = values.pop("model_type", None)
    try:
        with _quiet():
            if _has_own_code(spec):
                where = spec.name if spec.source == "hub" else str(spec.folder)  # the hub's code is fetched beside its config
                return AutoConfig.from_pretrained(where, trust_remote_code=True, **values)
            return CONFIG_MAPPING[model_type].from_dict({**values, "model_type": model_type})
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{spec.name}: transformers refuses the config: {_line(error)}", "Change the value with --set"
        ) from error


def model_class(spec: ModelSpec, config: Any) -> Any:
    """The class that `from_config` / `_from_config` is called on: the task's auto class, or the class that the config names."""
    import transformers

    named = [getattr(transformers, name, None) for name in (getattr(config, "architectures", None) or [])]
    if spec.task == "auto":
        return next((cls for cls in named if cls is not None), transformers.AutoModel)
    auto = getattr(transformers, tasks.AUTO_CLASS[spec.task])
    remote = _has_own_code(spec) and auto.__name__ in (getattr(config, "auto_map", None) or {})
    if not remote and type(config) not in auto._model_mapping:
        heads = {task: getattr(transformers, name)._model_mapping for task, name in tasks.AUTO_CLASS.items() if task != "auto"}
        able = [task for task, mapping in heads.items() if type(config) in mapping]
        raise UserError(f"task: transformers has no {spec.task} head for {spec.model_type}",
                        f"Choose one of {', '.join([*able, 'auto'])}")  # fmt: skip
    return auto


def _has_own_code(spec: ModelSpec) -> bool:
    return spec.trust_remote_code and spec.folder is not None and bool((spec.config or {}).get("auto_map"))


def _trust(spec: ModelSpec, cls: Any) -> dict[str, Any]:
    return {"trust_remote_code": True} if _has_own_code(spec) and hasattr(cls, "from_config") else {}


def _instantiate(cls: Any, config: Any, arguments: Mapping[str, Any], attention: str, notes: list[str]) -> tuple[Any, str]:
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    refused: list[str] = []
    for choice in dict.fromkeys((attention, "sdpa", "eager")):
        try:
            with _quiet(), _without_values() as valueless:
                module = _make(make, copy.deepcopy(config), {**arguments, "attn_implementation": choice})
                if valueless:
                    module.tie_weights()  # part of the initialisation that was left out
        except (ValueError, ImportError) as error:
            if choice == "eager" or not _is_about_attention(error):
                raise _refused(config, error) from error
            missing = isinstance(error, ImportError)
            refused.append(f"{choice} is not installed here" if missing else f"{config.model_type} does not support {choice}")
            continue
        except Exception as error:
            raise _refused(config, error) from error
        if refused and _has_attention(config):
            notes.append(f"attention: {' and '.join(refused)}, so it is built with {choice}")
        return module, choice
    raise AssertionError("eager attention always returns or raises")


def _make(make: Callable[..., Any], config: Any, arguments: Mapping[str, Any]) -> Any:
    """`make(config)`; a constructor that reads values (ConvNeXt's `linspace(..).tolist()`) runs on meta, not in a fake mode."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

    try:
        return make(config, **arguments)
    except DataDependentOutputException:
        device = torch.empty(0).device
        with unset_fake_temporarily(), torch.device("meta"):
            module = make(copy.deepcopy(config), **arguments)
    replaced: dict[int, Any] = {}  # by identity, so that tied weights stay tied
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in replaced:
                    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
                    parameter = isinstance(old, torch.nn.Parameter)
                    replaced[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad) if parameter else new
                tensors[name] = replaced[id(old)]
    return module


def _refused(config: Any, error: Exception) -> UserError:
    return UserError(f"{config.model_type}: the model cannot be built from its config: {type(error).__name__}: {_line(error)}",
                     "Check the sizes that were --set (heads must divide the hidden size, and so on)")  # fmt: skip


def _has_attention(config: Any) -> bool:
    """False for a convolutional network, to which eager or sdpa make no difference."""
    text = config.get_text_config()
    return any(getattr(text, key, None) for key in ("num_attention_heads", "num_heads", "n_heads", "n_head"))


def _is_about_attention(error: Exception) -> bool:
    text = str(error).lower()
    return "attention" in text or "flash" in text or "attn" in text


def _untie_head(module: Any, spec: ModelSpec) -> None:
    """Gives T5 v1.1, Flan-T5 and mT5 the separate head that their checkpoints hold.

    transformers 5 ties the head of these families when it builds them, whatever `tie_word_embeddings` says, and leaves it
    untied only when the checkpoint has both weights (`tie_weights(missing_keys=...)`): what is trained has its own head.
    """
    import torch

    head = getattr(module, "lm_head", None)
    wants_own = (spec.config or {}).get("tie_word_embeddings") is False and spec.model_type in ("t5", "mt5", "umt5")
    if wants_own and head is not None and head.weight is module.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _restore_fp32(module: Any, dtype: torch.dtype) -> None:
    """Puts back in fp32 what `from_pretrained` keeps there for 16-bit weights (T5's `wo`, some routers and norms)."""
    import torch

    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or [])
    if dtype == torch.float16:
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or [])
    if not names or dtype not in (torch.float16, torch.bfloat16):
        return
    pattern = re.compile("|".join(name.replace("*", ".*") for name in names))  # searched, as from_pretrained does
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and pattern.search(fqn):
            tensor.data = tensor.data.to(torch.float32)


def _pad_token_id(config: Any) -> int | None:
    return getattr(config, "pad_token_id", None)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _without_values() -> Iterator[bool]:
    """Leaves the weights' initialisation out where tensors hold no values (fake, meta): some of its ops would read them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers.initialization import no_init_weights

    probe = torch.empty(0)
    valueless = isinstance(probe, FakeTensor) or probe.is_meta
    if not valueless:
        yield False
        return
    with no_init_weights(), casts_in_place():
        yield True


@contextlib.contextmanager
def casts_in_place() -> Iterator[None]:
    """`module.to(dtype)` on fake tensors: torch would swap them, which it refuses where a weak reference to one exists."""
    from torch import nn

    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            tensor.data = fn(tensor.data)
        return self

    nn.Module._apply = apply  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' advice about generation, tokenizers and defaults is not for a user who asked about memory."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
