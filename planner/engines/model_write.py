"""What a training script must know of the model and its batch: config.json, and one sample's shapes.

Sizes are those that the answer was computed with: the samples are described from the very batch that was traced.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..trace.options import PARAM_DTYPE

if TYPE_CHECKING:
    from ...models import ModelSpec
    from ..request import Request

#: Tasks whose loss is the model's own, and whose auto class makes the model from a config.
_TRAINED = (
    "causal-lm", "masked-lm", "seq-classification", "token-classification", "question-answering", "seq2seq-lm",
    "image-classification", "ctc", "speech-seq2seq", "image-text-to-text",
)  # fmt: skip
_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_DESCRIBED = 2  # samples that are made to be described


def stored_dtype(request: Request) -> str:
    """The dtype that the program loads the model in: fp32 where FSDP keeps fp32 shards, else that of the precision.

    What an adapter leaves frozen has no fp32 copy.
    """
    sharded = request.strategy.startswith(("fsdp", "hsdp")) and request.adapter_settings is None
    if sharded and request.precision.endswith("-mixed"):
        return "float32"
    return PARAM_DTYPE[request.precision]


def model_of(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, the part of run.json that is about the model and its samples).

    Raises CannotTell for a model that no auto class makes, and for one without a loss of its own.
    """
    spec = request.model
    assert spec.config is not None, "a factory's model is written by factory_write"
    if spec.task not in _TRAINED:
        raise CannotTell(f"train.py: --task {spec.task} has no loss of its own. Name the task with --task")
    from ...models.builder import make_config, model_class
    from ...models.tasks import AUTO_CLASS

    if spec.trust_remote_code and (spec.config or {}).get("auto_map"):
        raise CannotTell("train.py: the model brings Python code of its own, which a written program would have to fetch")
    config = make_config(spec)
    cls = _made_class(model_class(spec, config), config)
    written = {**spec.config, **_settled(spec.task, config)}
    attention = request.attention
    if attention == "sdpa" and not getattr(cls, "_supports_sdpa", True):
        attention = "eager"
    run: dict[str, Any] = {
        "model": _weights(spec),
        "class": AUTO_CLASS[spec.task],
        "dtype": stored_dtype(request),
        "attention": attention,
        "task": spec.task,
        "seq_len": request.seq_len,
        "sample": _sample(request, config, cls),
    }
    if request.frozen:
        run["frozen"] = list(request.frozen)
    return written, run


def _weights(spec: ModelSpec) -> str | None:
    """Where the published weights are; None where there are none beside a config."""
    if spec.source != "folder" or spec.folder is None:
        return spec.name
    return str(spec.folder) if any(spec.folder.glob("*.safetensors")) or any(spec.folder.glob("*.bin")) else None


def _made_class(auto: Any, config: Any) -> Any:
    """The class that the auto class makes of `config`."""
    found = auto._model_mapping[type(config)]
    if not isinstance(found, (tuple, list)):
        return found
    return next((cls for cls in found if cls.__name__ in (config.architectures or ())), found[0])


def _settled(task: str, config: Any) -> dict[str, Any]:
    """What the answer took for granted where the config leaves it open (models/builder.py)."""
    found: dict[str, Any] = {}
    text = config.get_text_config()
    if task == "seq-classification" and getattr(config, "pad_token_id", None) is None and text.pad_token_id is None:
        found["pad_token_id"] = config.pad_token_id = text.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        known = (getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None))
        found["decoder_start_token_id"] = next((i for i in known if i is not None), 0)
    for key in _DROPS:
        if getattr(config, key, 0):
            found[key] = 0.0
    if task == "ctc" and getattr(config, "apply_spec_augment", False):
        found["apply_spec_augment"] = False
    return found


def _sample(request: Request, config: Any, cls: Any) -> dict[str, Any]:
    """{name: shape, dtype and range of one sample's tensor}; a name in the place of that: equal to that one."""
    import torch

    from ...models.batch import Inputs, ordinary_ids

    module: Any = types.SimpleNamespace(
        forward=types.MethodType(cls.forward, object()), main_input_name=getattr(cls, "main_input_name", "input_ids")
    )
    dtype = getattr(torch, stored_dtype(request))
    inputs = Inputs(config=config, task=request.model.task, module=module, dtype=dtype)
    batch = inputs.make(_DESCRIBED, request.seq_len, target_len=request.target_len, image_size=request.image_size)
    found: dict[str, Any] = {}
    for name, tensor in batch.items():
        shape = list(tensor.shape[1:])
        same = "input_ids" in batch and name == "labels" and tensor.shape == batch["input_ids"].shape
        if same and bool((tensor == batch["input_ids"]).all()):
            found[name] = "input_ids"
        elif tensor.is_floating_point():
            found[name] = {"shape": shape, "dtype": str(tensor.dtype).removeprefix("torch."), "low": 0, "high": 1}
        else:
            low, high = int(tensor.min()), int(tensor.max()) + 1
            tokens = name.endswith("input_ids") or (name == "labels" and shape and inputs.task in _SPELT)
            if tokens:
                low, high = ordinary_ids(inputs.text)
            found[name] = {"shape": shape, "dtype": "int64", "low": low, "high": high}
    if request.model.task == "seq-classification" and getattr(config, "is_encoder_decoder", False):
        found["input_ids"]["last"] = int(batch["input_ids"][0, -1])  # the head reads the hidden state of the last </s>
    return found


_SPELT = ("causal-lm", "masked-lm", "seq2seq-lm", "speech-seq2seq", "ctc", "image-text-to-text")  # labels are token ids
