"""The options that say what is asked, shared by every command that takes a MODEL, and the Request that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .strategies import RELAY, ZEROTH_ORDER

if TYPE_CHECKING:
    from ..models import ModelSpec
    from ..models.adapters import AdapterSettings
    from .request import Request
    from .strategies.l2l import L2lSettings
    from .strategies.zo_settings import ZoSettings

ADAPTER_OPTIONS = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "modules_to_save", "virtual_tokens", "base_quant", "no_upcast",
    "adapter_16bit", "no_autocast",
)  # fmt: skip


def add_model_options(parser: argparse.ArgumentParser, *, named_by_file: bool = False) -> None:
    """MODEL, and the options of the model and its batch; `named_by_file`: it may be left out where --from names it."""
    words = "a name (`memplan models list`), a hub id, a folder, FILE.py:FUNCTION"
    if named_by_file:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=words + " (default: what the file of --from names)")
    else:
        parser.add_argument("model", metavar="MODEL", help=words)
    group = parser.add_argument_group("the model and its batch")
    group.add_argument("--task", metavar="T", help="what it is trained for (default: what the config says)")
    group.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="change a config value (may be repeated)"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="allow the model's own Python code to run")
    group.add_argument("--micro-batch", type=int, metavar="N", help="samples in one forward pass on one GPU (default: 1)")
    group.add_argument("--seq", type=int, metavar="N", help="tokens in one sample (default: 2048, or the model's limit)")
    group.add_argument("--target-len", type=int, metavar="N", help="tokens of the labels of a sequence-to-sequence model")
    group.add_argument("--image-size", type=int, metavar="N", help="pixels on a side")


def add_hardware_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """The options of the hardware; `default` is the value of --gpu."""
    group = parser.add_argument_group("the hardware")
    where = f"a card of `memplan hardware list`, or auto: the one in this machine (default: {default})"
    group.add_argument("--gpu", metavar="KEY", default=default, help=where)
    group.add_argument("--gpu-memory", metavar="SIZE", help="memory of the card, instead of the catalogue's: 24GiB, 80GB")
    _add_scale_options(group)


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """How many GPUs and machines, for a command that runs on what it finds."""
    _add_scale_options(parser.add_argument_group("how many"))


def _add_scale_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs in all (default: 1)")
    group.add_argument("--nodes", type=int, metavar="N", help="machines that the GPUs are spread over (default: 1)")
    group.add_argument("--host-ram", metavar="SIZE", help="memory of each machine: 512GiB (default: not known)")
    group.add_argument("--nvme", metavar="SIZE", help="free disk of each machine for offload: 2TiB (default: not known)")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of how it is trained, and of the training loop."""
    how = parser.add_argument_group("how it is trained")
    files = (
        "a training file as it is: axolotl, LLaMA-Factory, TRL, torchtune, DeepSpeed's JSON, accelerate's YAML, "
        "TrainingArguments, an fsdp_config; options go before it"
    )
    how.add_argument("--from", dest="from_file", metavar="FILE", help=files)
    precisions = "fp32, bf16, fp16, bf16-autocast, fp16-autocast, bf16-mixed, fp16-mixed (default: as the weights are stored)"
    how.add_argument("--precision", metavar="P", help=precisions)
    how.add_argument("--mode", metavar="M", help="train (default), forward: no backward, inference: under no_grad")
    methods = "full (default), lora, qlora, dora, oft, ia3 ..., galore, apollo, badam, hift, lomo, l2l, mezo, zo2, distzo2"
    how.add_argument("--method", metavar="M", help=methods)
    how.add_argument("--strategy", metavar="S", help="single (default), ddp, zero0 .. zero3, fsdp1, fsdp2, hsdp")
    how.add_argument("--optimizer", metavar="O", help="adamw (default), flash-adamw, adamw-8bit ...: `memplan optimizers list`")
    how.add_argument(
        "--grad-release", action="store_true", help="step each parameter inside backward and drop its gradient at once"
    )
    how.add_argument("--optimizer-impl", metavar="I", help="default: what torch picks; foreach, fused, for-loop")
    how.add_argument(
        "--recompute",
        metavar="R",
        help="none (default), full, every-k:N, selective-layer:N, selective-op[:matmul+attention], selective[:GiB]: "
        "the cheapest choice that fits into that much (default: the GPU), which is printed as keep:...",
    )
    how.add_argument(
        "--loss",
        metavar="L",
        help="hf: the model's own (default), plain: logits as they are, shifted, chunked[:N]: head and loss in N (8) chunks "
        "of tokens, liger: fused with the head, tiled[:N]: DeepSpeed's TiledFusedLogitsLoss in N (8) tiles",
    )
    how.add_argument("--tiled-mlp", type=int, metavar="N", help="every MLP runs in N tiles of tokens (DeepSpeed's TiledMLP)")
    how.add_argument(
        "--use-cache", action="store_true", help="the model builds a key-value cache while it trains (Trainer: off)"
    )
    how.add_argument("--reentrant", action="store_true", help="the older, reentrant kind of activation checkpointing")
    how.add_argument("--attention", metavar="A", help="sdpa (default), eager, flash2: the flash-attn package")
    how.add_argument(
        "--freeze", metavar="PREFIX", action="append", default=[], help="parameters that do not train (may be repeated)"
    )
    how.add_argument(
        "--offload",
        metavar="X",
        help="what leaves the GPU: optimizer, param, activation, optimizer:nvme, param:nvme, joined with + (default: none)",
    )
    how.add_argument("--rank", type=int, metavar="R", help="the process that is shown (default: the one that needs most)")
    how.add_argument("--compile", action="store_true", help="the run uses torch.compile, which is not modelled")
    how.add_argument("--assume-eager", action="store_true", help="with --compile: answer as if it did not")
    zo = parser.add_argument_group("zeroth-order training (--method mezo, zo2, distzo2)")
    zo.add_argument("--zo-pert", type=int, metavar="N", help="GPUs that share the two perturbed forwards of a step: 1 or 2")
    zo.add_argument(
        "--zo-data", type=int, metavar="N", help="groups of GPUs with a batch of their own (default: what --gpus leaves)"
    )
    zo.add_argument("--zo-slice", action="store_true", help="each GPU uploads its share of a block, NVLink brings the rest")
    zo.add_argument("--zo-offload-blocks", metavar="N", help="how many blocks live on the host: a number, or all (default)")
    zo.add_argument("--zo-bucket", action="store_true", help="a block moves as one flat tensor")
    zo.add_argument("--zo-amp", action="store_true", help="fp32 on the GPU with autocast, fewer bits on the host")
    zo.add_argument("--zo-host-precision", metavar="P", help="with --zo-amp, what the host keeps: fp16 (default), bf16, fp8")
    zo.add_argument("--zo-no-overlap", action="store_true", help="copies wait for compute, from pageable memory")
    zo.add_argument(
        "--zo-eval-batch", type=int, metavar="N", help="evaluations between steps, with micro batch N, have to fit as well"
    )
    zo.add_argument("--zo-train", metavar="W", help="what a step perturbs: all (default), lora, prefix-tuning")
    zo.add_argument("--zo-no-cache", action="store_true", help="mezo, and evaluations: no key-value cache is built")
    relay = parser.add_argument_group("layer-to-layer relay (--method l2l)")
    relay.add_argument("--l2l-stash", metavar="W", help="where the inputs of the blocks wait for backward: gpu (default), host")
    relay.add_argument("--l2l-no-overlap", action="store_true", help="one layer at a time, copied from pageable memory")
    adapters = parser.add_argument_group("adapters (--method lora, qlora, dora, rslora, oft, ia3, prefix-tuning ...)")
    adapters.add_argument("--lora-rank", type=int, metavar="R", help="rank; of OFT and C3A the block size (default: peft's)")
    adapters.add_argument("--lora-alpha", type=float, metavar="A", help="scale of the adapter: no memory depends on it")
    adapters.add_argument("--lora-dropout", type=float, metavar="P", help="dropout in front of the adapter (default: peft's)")
    targets = "all-linear, module names: q_proj,v_proj, or re:PATTERN for whole paths (default: what peft takes for the family)"
    adapters.add_argument("--lora-targets", metavar="NAMES", help=targets)
    adapters.add_argument(
        "--modules-to-save", metavar="NAMES", help="modules that train in full beside the adapter: lm_head,..."
    )
    adapters.add_argument("--virtual-tokens", type=int, metavar="N", help="tokens of prompt, prefix and p-tuning (default: 20)")
    quants = "how the frozen weights are stored: none, nf4, nf4-dq (double quantisation; qlora's), fp4, fp4-dq, int8, gptq"
    adapters.add_argument("--base-quant", metavar="Q", help=quants)
    adapters.add_argument(
        "--no-upcast", action="store_true", help="without prepare_model_for_kbit_training: norms and head stay in 16 bits"
    )
    adapters.add_argument("--adapter-16bit", action="store_true", help="adapters in the dtype of the base, not in fp32")
    adapters.add_argument("--no-autocast", action="store_true", help="the step of a 16-bit precision runs without autocast")
    loop = parser.add_argument_group("the training loop")
    loop.add_argument(
        "--grad-accum", type=int, metavar="N", help="forward and backward passes in one optimizer step (default: 1)"
    )
    moments = ("after-step", "before-forward", "before-backward")
    loop.add_argument("--zero-grad", choices=moments, help="when the loop clears gradients (default: after-step)")
    loop.add_argument("--keep-grads", action="store_true", help="zero_grad(set_to_none=False): gradients stay allocated")
    loop.add_argument("--clip-grad-norm", action="store_true", help="gradients are clipped by norm before the step")
    loop.add_argument("--keep-outputs", action="store_true", help="the loop holds the model's output during backward and step")
    loop.add_argument("--alloc-conf", metavar="TEXT", help="settings as in PYTORCH_ALLOC_CONF")


def request_from(args: argparse.Namespace) -> Request:
    """The question that the options of this module ask.  Raises UserError with the option's name."""
    from dataclasses import replace

    from ..models.overrides import parse_settings
    from ..units import parse_bytes
    from .api import make_request

    for option in ("micro_batch", "seq", "target_len", "image_size", "gpus", "nodes", "grad_accum"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: must be 1 or more", "Leave it out for the default")
    loop = {"grad_accum_steps": args.grad_accum, "zero_grad": args.zero_grad}
    settle_model(args)
    given = _adapter_given(args)
    options: dict[str, Any] = {
        "micro_batch_size": args.micro_batch,
        "seq_len": args.seq,
        "target_len": args.target_len,
        "image_size": args.image_size,
        "precision": args.precision,
        "method": args.method,
        "strategy": _strategy(args),
        "optimizer": args.optimizer,
        "optimizer_impl": args.optimizer_impl,
        "recompute": args.recompute,
        "loss": args.loss,
        "mlp_tiles": args.tiled_mlp,
        "use_cache": args.use_cache,
        "reentrant": args.reentrant,
        "attention": args.attention,
        "mode": args.mode,
        "gpus": args.gpus,
        "nodes": args.nodes,
        "rank": args.rank,
        "offload": _parts(args.offload),
        "host_ram_bytes": args.host_ram and parse_bytes(args.host_ram, "--host-ram"),
        "nvme_bytes": args.nvme and parse_bytes(args.nvme, "--nvme"),
        "zo": _zo_settings(args),
        "l2l": _l2l_settings(args),
        "adapter": _zo_adapter(args, given) or (given if args.from_file else _adapter_settings(args.method, given)),
        "frozen": tuple(args.freeze),
        "compiled": args.compile and not args.assume_eager,
        "alloc_conf": args.alloc_conf,
        "set_to_none": not args.keep_grads,
        "clip_grad_norm": args.clip_grad_norm,
        "keep_outputs": args.keep_outputs,
        **{name: value for name, value in loop.items() if value is not None},
    }
    overrides = parse_settings(args.set)
    model: str | ModelSpec = args.model
    notes: list[str] = []
    gpu, gpu_memory, eager = args.gpu, args.gpu_memory, False
    if args.from_file:
        from ..models import load
        from .engines.detect import read_config
        from .engines.imported import apply

        imported = read_config(args.from_file)
        if imported.spec is not None and not (args.task or args.set) and imported.model and args.model == imported.model.value:
            model = imported.spec
        else:
            model = load(args.model, task=args.task, overrides=overrides, trust_remote_code=args.trust_remote_code)
        eager = args.assume_eager and "compiled" in imported.said
        imported = imported.without("compiled") if eager else imported
        options = apply(imported, options, model.config)
        notes = options.pop("notes")
        own, memory = options.pop("gpu", gpu), options.pop("gpu_memory", None)
        if gpu == "auto":
            gpu, gpu_memory = own, gpu_memory or memory
        if imported.model is not None and imported.model.value != args.model:
            notes.insert(0, f"{imported.source}: MODEL {args.model} is taken, not {imported.model.key} of the file")
    request = make_request(
        model,
        gpu,
        task=args.task,
        overrides=overrides,
        gpu_memory=gpu_memory,
        trust_remote_code=args.trust_remote_code,
        **options,
    )
    request = replace(request, defaults=(*request.defaults, *notes))
    if (args.compile and args.assume_eager) or eager:
        said = (
            "the run uses torch.compile and is answered as if it did not (--assume-eager): compiled kernels keep other tensors"
        )
        request = replace(request, defaults=(*request.defaults, said))
    return request


def _strategy(args: argparse.Namespace) -> str | None:
    if not args.grad_release:
        return args.strategy  # type: ignore[no-any-return]
    if args.strategy not in (None, "single", "release"):
        raise UserError(
            f"--grad-release with --strategy {args.strategy}: a gradient that is gone cannot be reduced over ranks",
            "Leave one of them out",
        )
    return "release"


def _parts(text: str | None) -> tuple[str, ...]:
    """ "optimizer+param" as its parts; "none" and nothing are no parts."""
    return () if text in (None, "", "none") else tuple(text.split("+"))


def settle_model(args: argparse.Namespace) -> None:
    """MODEL where it was left out: what the file of --from names.  Raises UserError where nothing names one."""
    if args.model is not None:
        return
    if not args.from_file:
        raise UserError("MODEL is missing", "Name one, for example meta-llama/Llama-3.1-8B; `memplan models list` shows all")
    from .engines.detect import read_config

    imported = read_config(args.from_file)
    if imported.model is None:
        raise UserError(f"{args.from_file} names no model that memplan knows", "Say it on the command line: MODEL")
    args.model = imported.model.value


def _adapter_given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of AdapterSettings that were said.  Raises UserError where --method has no adapter."""
    from ..models.adapters import ADAPTER_METHODS

    given = {
        "rank": args.lora_rank,
        "alpha": args.lora_alpha,
        "dropout": args.lora_dropout,
        "targets": (args.lora_targets,) if (args.lora_targets or "").startswith("re:") else _names(args.lora_targets),
        "modules_to_save": _names(args.modules_to_save),
        "virtual_tokens": args.virtual_tokens,
        "base_quant": args.base_quant,
        "upcast": False if args.no_upcast else None,
        "adapter_dtype": "base" if args.adapter_16bit else None,
        "autocast": False if args.no_autocast else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    elsewhere = args.method not in ADAPTER_METHODS and args.zo_train in (None, "all")
    if given and elsewhere and not (args.from_file and args.method is None):
        option = next(o for o in ADAPTER_OPTIONS if getattr(args, o) not in (None, False))
        raise UserError(
            f"--{option.replace('_', '-')} with --method {args.method or 'full'}: it belongs to adapters", "Use --method lora"
        )
    return given


def _adapter_settings(method: str | None, given: dict[str, Any]) -> AdapterSettings | None:
    """What the options of adapters say, or None where none was given."""
    from ..models.adapters import AdapterSettings

    if not given or method is None:
        return None
    settings = AdapterSettings.of(method, **given)
    settings.check()
    return settings


def _names(text: str | None) -> tuple[str, ...] | None:
    """ "q_proj,v_proj" as its names."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _zo_adapter(args: argparse.Namespace, given: dict[str, Any]) -> AdapterSettings | None:
    """The adapter that a zeroth-order method perturbs; None where it perturbs all."""
    if args.method not in ZEROTH_ORDER or args.zo_train in (None, "all"):
        return None
    from .strategies.zo_settings import adapter_of

    settings = adapter_of(args.zo_train, given)
    settings.check()
    return settings


def _l2l_settings(args: argparse.Namespace) -> L2lSettings | None:
    """The --l2l-* options, or None where none was given."""
    if args.l2l_stash is None and not args.l2l_no_overlap:
        return None
    if args.method != RELAY:
        option = "--l2l-stash" if args.l2l_stash is not None else "--l2l-no-overlap"
        raise UserError(f"{option} with --method {args.method or 'full'}: it belongs to the relay", f"Use --method {RELAY}")
    from .strategies.l2l import L2lSettings

    return L2lSettings(overlap=not args.l2l_no_overlap, stash=args.l2l_stash or "gpu")


def _zo_settings(args: argparse.Namespace) -> ZoSettings | None:
    """The --zo-* options, or None where none was given."""
    from .strategies.zo_settings import ZoSettings

    if args.zo_data is None and args.method == "distzo2" and args.gpus and args.gpus % (args.zo_pert or 1) == 0:
        args.zo_data = args.gpus // (args.zo_pert or 1)
    given = {
        "zo_pert": args.zo_pert,
        "zo_data": args.zo_data,
        "zo_slice": args.zo_slice or None,
        "offloading_blocks": _blocks(args.zo_offload_blocks),
        "bucket": args.zo_bucket or None,
        "amp": args.zo_amp or None,
        "precision_on_offloading_device": args.zo_host_precision,
        "overlap": False if args.zo_no_overlap else None,
        "use_cache": False if args.zo_no_cache else None,
        "eval_batch": args.zo_eval_batch,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for option in ("optimizer", "optimizer_impl"):
        if args.method in ZEROTH_ORDER and getattr(args, option) is not None:
            raise UserError(f"--{option.replace('_', '-')}: --method {args.method} has no optimizer", "Leave it out")
    if (given or args.zo_train) and args.method not in ZEROTH_ORDER:
        option = next(o for o in vars(args) if o.startswith("zo_") and getattr(args, o))
        raise UserError(
            f"--{option.replace('_', '-')} with --method {args.method or 'full'}: it belongs to zeroth-order training",
            "Use --method zo2",
        )
    return ZoSettings(**given) if given else None


def _blocks(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--zo-offload-blocks {text}: expected a number or all", "Leave it out for all") from None
