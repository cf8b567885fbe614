"""The options that say what is asked, shared by every command that takes a MODEL, and the Request that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import UserError
from .strategies import ZEROTH_ORDER

if TYPE_CHECKING:
    from .request import Request
    from .strategies.zo_settings import ZoSettings


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the options of the model and its batch."""
    parser.add_argument("model", metavar="MODEL", help="a name (`memplan models list`), a hub id, a folder, FILE.py:FUNCTION")
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
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs in all (default: 1)")
    group.add_argument("--nodes", type=int, metavar="N", help="machines that the GPUs are spread over (default: 1)")
    group.add_argument("--host-ram", metavar="SIZE", help="memory of each machine: 512GiB (default: not known)")
    group.add_argument("--nvme", metavar="SIZE", help="free disk of each machine for offload: 2TiB (default: not known)")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of how it is trained, and of the training loop."""
    how = parser.add_argument_group("how it is trained")
    precisions = "fp32, bf16, fp16, bf16-autocast, fp16-autocast, bf16-mixed, fp16-mixed (default: as the weights are stored)"
    how.add_argument("--precision", metavar="P", help=precisions)
    how.add_argument("--mode", metavar="M", help="train (default), forward: no backward, inference: under no_grad")
    how.add_argument("--method", metavar="M", help="full (default), mezo, zo2, distzo2")
    how.add_argument("--strategy", metavar="S", help="single (default), ddp, zero0 .. zero3, fsdp1, fsdp2, hsdp")
    how.add_argument(
        "--optimizer", metavar="O", help="adamw (default), adam, sgd, sgd-momentum, adafactor and others of torch.optim"
    )
    how.add_argument("--optimizer-impl", metavar="I", help="default: what torch picks; foreach, fused, for-loop")
    how.add_argument(
        "--recompute", metavar="R", help="none (default), full, every-k:N, selective-layer:N, selective-op[:matmul+attention]"
    )
    how.add_argument(
        "--loss",
        metavar="L",
        help="hf: the model's own (default), plain: logits as they are, shifted: on shifted copies of them, chunked: in chunks",
    )
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
        help="what leaves the GPU: optimizer, param, optimizer:nvme, param:nvme, joined with + (default: none)",
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
    zo.add_argument("--zo-no-cache", action="store_true", help="mezo: the forward builds no key-value cache")
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
    request = make_request(
        args.model,
        args.gpu,
        task=args.task,
        overrides=parse_settings(args.set),
        gpu_memory=args.gpu_memory,
        trust_remote_code=args.trust_remote_code,
        micro_batch_size=args.micro_batch,
        seq_len=args.seq,
        target_len=args.target_len,
        image_size=args.image_size,
        precision=args.precision,
        method=args.method,
        strategy=args.strategy,
        optimizer=args.optimizer,
        optimizer_impl=args.optimizer_impl,
        recompute=args.recompute,
        loss=args.loss,
        use_cache=args.use_cache,
        reentrant=args.reentrant,
        attention=args.attention,
        mode=args.mode,
        gpus=args.gpus,
        nodes=args.nodes,
        rank=args.rank,
        offload=_parts(args.offload),
        host_ram_bytes=args.host_ram and parse_bytes(args.host_ram, "--host-ram"),
        nvme_bytes=args.nvme and parse_bytes(args.nvme, "--nvme"),
        zo=_zo_settings(args),
        frozen=tuple(args.freeze),
        compiled=args.compile and not args.assume_eager,
        alloc_conf=args.alloc_conf,
        set_to_none=not args.keep_grads,
        clip_grad_norm=args.clip_grad_norm,
        keep_outputs=args.keep_outputs,
        **{name: value for name, value in loop.items() if value is not None},
    )
    if args.compile and args.assume_eager:
        said = (
            "the run uses torch.compile and is answered as if it did not (--assume-eager): compiled kernels keep other tensors"
        )
        request = replace(request, defaults=(*request.defaults, said))
    return request


def _parts(text: str | None) -> tuple[str, ...]:
    """ "optimizer+param" as its parts; "none" and nothing are no parts."""
    return () if text in (None, "", "none") else tuple(text.split("+"))


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
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and args.method not in ZEROTH_ORDER:
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
