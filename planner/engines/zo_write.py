"""MeZO, ZO2 and DistZO2 as files: what their own programs are told, and zo_run.json for memplan's runtime of all three.

* mezo: mezo_args.json, the arguments of `large_models/run.py` (princeton-nlp/MeZO at 552cb1b, `OurArguments`), and mezo.sh;
* zo2: zo2_config.json, the fields of `MeZOSGDConfig` (liangyuwang/zo2 at 4bca25c, zo2/config/mezo_sgd.py), and train.py, which
  makes the model by `zo_hf_init` and `zo_init`;
* distzo2: distzo2.sh, which runs zo_run.json by torchrun, since no code of DistZO2 is public.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from .plan_file import MEZO_SCRIPT
from .zo_file import CONFIG, RUN, ZoFile

if TYPE_CHECKING:
    from ..request import Request

MEZO_ARGS = "mezo_args.json"
ZO2_CONFIG, ZO2_SCRIPT = "zo2_config.json", "train.py"
DIST_SCRIPT = "distzo2.sh"
RUNTIME = "memplan.validator.runtimes.zo"
# model_type -> the class of it that zo2 replaces (zo2/model/huggingface/zo_init.py), for causal language models
ZO2_MODELS = {"opt": "OPTForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ZO2_LOSS = {"opt": "shifted", "qwen3": "model"}
_LOADED_AS = {"fp32": {}, "fp16": {"load_float16": True}, "bf16": {"load_bfloat16": True},
              "fp16-autocast": {"fp16": True}, "bf16-autocast": {"bf16": True}}  # fmt: skip
# princeton-nlp/MeZO, large_models/mezo.sh and README.md: what every run of theirs says
_MEZO_DEFAULTS: dict[str, Any] = {
    "task_name": "SST2",
    "train_set_seed": 0,
    "num_train": 1000,
    "num_dev": 500,
    "num_eval": 1000,
    "max_steps": 20000,
    "logging_steps": 10,
    "lr_scheduler_type": "constant",
    "evaluation_strategy": "steps",
    "save_strategy": "steps",
    "save_total_limit": 1,
    "eval_steps": 4000,
    "save_steps": 4000,
    "load_best_model_at_end": True,
}
# as zo2's own dataclass names them (torch.dtype there, text here)
ZO2_DTYPES = ("amp_precision", "precision_on_offloading_device", "precision_on_working_device")


def zo_files(request: Request) -> tuple[dict[str, str], list[str]]:
    """(name -> text, what the files cannot say) of a zeroth-order question; they are started inside their folder.

    Raises CannotTell for what the method's own program cannot be told.
    """
    run = ZoFile.of(request)
    texts, notes = {"mezo": _mezo, "zo2": _zo2, "distzo2": _distzo2}[request.method](request, run)
    texts[RUN] = run.text()
    texts[CONFIG] = json.dumps(request.model.config, indent=2) + "\n"
    return texts, [*notes, f"{RUN} runs by memplan's own runtime: {runtime_command(request)}"]


def launch(request: Request) -> str:
    """The command that starts the method's own program."""
    return {"mezo": f"bash {MEZO_SCRIPT}", "zo2": f"python {ZO2_SCRIPT}", "distzo2": f"bash {DIST_SCRIPT}"}[request.method]


def runtime_command(request: Request) -> str:
    """The command that runs zo_run.json."""
    start = "python" if request.gpus == 1 else f"torchrun {_processes(request)}"
    return f"{start} -m {RUNTIME} {RUN}"


def _processes(request: Request) -> str:
    each = f"--nproc-per-node {request.gpus // request.nodes}"
    if request.nodes == 1:
        return f"--standalone {each}"
    return f'--nnodes {request.nodes} {each} --rdzv-backend c10d --rdzv-endpoint "${{MASTER:?the first machine, as HOST:PORT}}"'


# -- MeZO -------------------------------------------------------------------------------------------------------------------


def mezo_arguments(request: Request, run: ZoFile) -> dict[str, Any]:
    """The arguments of MeZO's run.py."""
    adapter: dict[str, Any] = {}
    if run.adapter is not None:
        words = {"lora": {"lora": True}, "prefix-tuning": {"prefix_tuning": True}}
        if run.adapter.kind not in words:
            raise CannotTell(f"MeZO's trainer has lora and prefix-tuning, not {run.adapter.kind}")
        adapter = dict(words[run.adapter.kind])
        if run.adapter.kind == "lora":
            adapter |= {"lora_r": run.adapter.rank or 8, "lora_alpha": int(run.adapter.alpha or 16)}
        else:
            adapter |= {"num_prefix": run.adapter.virtual_tokens or 5, "no_reparam": True, "prefix_init_by_real_act": True}
    return {
        "model_name": run.model,
        "output_dir": "result",
        "trainer": "zo",
        **_LOADED_AS[run.precision],
        "learning_rate": run.lr,
        "zo_eps": run.eps,
        "weight_decay": run.weight_decay,
        "per_device_train_batch_size": run.micro_batch_size,
        "max_length": run.seq_len,
        "train_as_classification": False,  # else a row is run once for each of its answers
        "only_train_option": run.loss == "shifted",  # its own loss, on shifted logits in their own dtype
        **adapter,
        **_MEZO_DEFAULTS,
    }


def _mezo(request: Request, run: ZoFile) -> tuple[dict[str, str], list[str]]:
    if run.task != "causal-lm":
        raise CannotTell(f"--task {run.task}: MeZO's trainer (large_models) trains causal language models")
    if request.gpus > 1:
        raise CannotTell(f"--gpus {request.gpus}: MeZO's trainer lays layers on several GPUs by itself (device_map='auto')")
    arguments = mezo_arguments(request, run)
    flags = " \\\n    ".join(f"--{name} {_shell(value)}" for name, value in arguments.items())
    script = (
        "#!/bin/bash\n"
        "# MeZO's trainer (github.com/princeton-nlp/MeZO) with the arguments of mezo_args.json.\n"
        "# MEZO: its folder large_models.  More arguments, --task_name RTE for instance, are passed on.\n"
        'cd "${MEZO:?say where the folder large_models of MeZO lies}" || exit 2\n'
        f'python run.py \\\n    {flags} \\\n    "$@"\n'
    )
    said = {
        "its sequences are as long as the task's texts, at most --max_length": True,
        "a row is run once for each answer with --train_as_classification True: a larger batch": True,
        "config.use_cache = False has no argument: set it in run.py (load_model)": not run.zo.use_cache,
        f"freeze the parameters that begin with {', '.join(run.frozen)} in run.py (load_model)": bool(run.frozen),
        f"the loss is that of --loss {'shifted' if arguments['only_train_option'] else 'model'}": run.loss == "plain",
        "transformers 4.28, which it asks for, computes attention as --attention eager does": run.attention != "eager",
        "it puts LoRA on q_proj and v_proj, in the precision of the model": run.adapter is not None
        and run.adapter.kind == "lora",
    }
    return {MEZO_ARGS: _json(arguments), MEZO_SCRIPT: script}, [
        f"{MEZO_SCRIPT}: {what}" for what, holds in said.items() if holds
    ]


def _shell(value: Any) -> str:
    return shlex.quote(str(value))


# -- ZO2 --------------------------------------------------------------------------------------------------------------------


def zo2_config(run: ZoFile) -> dict[str, Any]:
    """Every field of `MeZOSGDConfig`; types of torch by name."""
    zo = run.zo
    narrow = "float16" if run.precision == "fp16-autocast" else "bfloat16"
    return {
        "zo_method": "mezo-sgd",
        "lr": run.lr,
        "weight_decay": run.weight_decay,
        "eps": run.eps,
        "zo2": True,
        "offloading_blocks": None if zo.offloading_blocks == "all" else list(range(zo.offloading_blocks)),
        "offloading_device": "cpu",
        "working_device": "cuda:0",  # plain "cuda" is refused under amp
        "overlap": zo.overlap,
        "compute_module_optimize_method": "",
        "compute_function_optimize_method": "",
        "communicate_optimize_method": "bucket" if zo.bucket else "",
        "amp": zo.amp,
        "amp_precision": narrow,
        "precision_on_offloading_device": zo.host_dtype("float16"),
        "precision_on_working_device": "float32",
        "amp_compress_method": "naive",
        "debug_mode": False,
    }


def _zo2(request: Request, run: ZoFile) -> tuple[dict[str, str], list[str]]:
    kind = request.model.model_type
    if kind not in ZO2_MODELS or run.task != "causal-lm":
        what = kind if kind not in ZO2_MODELS else f"{kind} for {run.task}"
        raise CannotTell(
            f"zo2 trains {' and '.join(sorted(ZO2_MODELS))} as causal language models, not {what}. Use --method distzo2"
        )
    if run.adapter is not None:
        raise CannotTell(f"zo2 has no {run.adapter.kind}: its runner trains the whole model. Use --method mezo")
    texts = {ZO2_CONFIG: _json(zo2_config(run)), ZO2_SCRIPT: _ZO2_SCRIPT}
    notes = [
        f"{ZO2_SCRIPT}: zo2 is installed from github.com/liangyuwang/zo2, and imports with transformers 4.51",
        f"{ZO2_SCRIPT}: the last update is never applied by zo2; the saved weights lack it",
    ]
    if run.loss != ZO2_LOSS[kind]:
        notes.append(f"{ZO2_SCRIPT}: zo2 computes the loss of {kind} as --loss {ZO2_LOSS[kind]} does")
    return texts, notes


# -- DistZO2 ----------------------------------------------------------------------------------------------------------------


def _distzo2(request: Request, run: ZoFile) -> tuple[dict[str, str], list[str]]:
    script = (
        "#!/bin/bash\n"
        f"# Runs {RUN} on {request.gpus} GPUs; without them, on as many processes of the CPU.\n"
        f'torchrun {_processes(request)} -m {RUNTIME} "$(dirname "$0")/{RUN}" "$@"\n'
    )
    notes = [f"{DIST_SCRIPT}: memplan has to be installed on every machine"]
    if request.nodes > 1:
        notes.append(f"{DIST_SCRIPT}: start it on all {request.nodes} machines, with MASTER=HOST:PORT of the first")
    return {DIST_SCRIPT: script}, notes


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


_ZO2_SCRIPT = '''"""Trains with ZO2 (github.com/liangyuwang/zo2) on one GPU.

    python train.py --steps 100 [--data FILE.txt] [--random-weights] [--save FOLDER]

zo2_config.json holds the fields of zo2's MeZOSGDConfig, zo_run.json and config.json the model and its batch.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, Trainer  # noqa: F401  Trainer before zo2: it makes the module anew
from zo2 import ZOConfig, zo_hf_init

HERE = Path(__file__).resolve().parent
CLASSES = {"opt": "OPTForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # else fp32, also under amp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--data", help="a text file (default: random tokens)")
parser.add_argument("--random-weights", action="store_true", help="load nothing")
parser.add_argument("--save", help="folder for the trained model; it lacks the last step's update")
args = parser.parse_args()

run = json.loads((HERE / "zo_run.json").read_text())
fields = json.loads((HERE / "zo2_config.json").read_text())
for name in ("amp_precision", "precision_on_offloading_device", "precision_on_working_device"):
    fields[name] = getattr(torch, fields[name])
zo = ZOConfig(method=fields.pop("zo_method"), **fields)
config = AutoConfig.from_pretrained(HERE, attn_implementation=run["attention"])
dtype = DTYPES.get(run["precision"], torch.float32)

with zo_hf_init(zo):
    import transformers  # here, as its classes are zo2's only now

    model_class = getattr(transformers, CLASSES[config.model_type])
    if args.random_weights:
        torch.manual_seed(run["seed"])
        torch.set_default_dtype(dtype)
        model = model_class(config)
        torch.set_default_dtype(torch.float32)
    else:
        model = model_class.from_pretrained(run["model"], config=config, torch_dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(run["frozen"])))
    model.zo_init(zo)
assert hasattr(model, "zo_training"), "zo2 did not replace the class of the model"

rows, length = run["micro_batch_size"], run["seq_len"]
if args.data:
    tokenizer = AutoTokenizer.from_pretrained(run["model"])
    ids = tokenizer(Path(args.data).read_text(), return_tensors="pt").input_ids[0]
    ids = ids.repeat(-(-rows * length // len(ids)))
else:
    ids = torch.randint(config.vocab_size, (rows * length * 8,))
batches = ids[: len(ids) // (rows * length) * rows * length].view(-1, rows, length)

model.zo_train()
for step in range(args.steps):
    batch = batches[step % len(batches)].to(zo.working_device)
    loss = model(input_ids=batch, labels=batch)
    print(f"step {step + 1}: loss {float(loss):.4f}, projected gradient {float(model.opt.projected_grad):.4g}", flush=True)
if torch.cuda.is_available():
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB allocated")
if args.save:
    model.save_pretrained(args.save)
'''
