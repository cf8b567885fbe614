"""The text of train.py: one program for transformers' Trainer, one with a plain loop, and the parts that both have.

What the program does is said by the files beside it (run.json, training_args.json, ds_config.json ...): the text has no copy
of them, and nothing in it needs memplan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a train.py has to have."""

    title: str
    launch: str
    trainer: bool = True
    """transformers' Trainer; False: a plain loop."""
    factory: bool = False
    """A function of the user's makes the model and its batches; only with a plain loop."""
    frozen: bool = False
    alloc_conf: bool = False
    """run.json says PYTORCH_ALLOC_CONF."""
    adapter: bool = False
    """A peft configuration lies beside it."""
    quantised: bool = False
    """A bitsandbytes configuration lies beside it."""
    optimizer: bool = False
    """run.json names the optimizer's class."""
    optimizer_takes: str = ""
    """What of the model it is given beside a list of weights: names, low-rank, muon, blocks."""
    optimizer_modes: bool = False
    """It has to be told that it trains."""
    deepspeed: bool = False
    processes: bool = False
    """One process a GPU."""
    trainer_fsdp: bool = False
    """The Trainer shards by FSDP."""
    own_loss: bool = False
    """loss.py beside it changes the model."""
    # of a plain loop
    ddp: bool = False
    fsdp2: bool = False
    release: bool = False
    autocast: bool = False
    clips: bool = False
    recompute_all: bool = False
    """As the model does it itself."""
    recompute_some: bool = False
    """As recompute.py beside it does."""
    recompute_whole: bool = False
    """... unless the user's model does it itself."""


def text_of(program: Program) -> str:
    """train.py, whole."""
    body = _trainer(program) if program.trainer else _loop(program)
    model = [_FACTORY_OPTIONS, _factory(program)] if program.factory else [_OPTIONS, _model(program), _SAMPLES, _FILE]
    parts = [_head(program), *model, *([_OPTIMIZER] if program.optimizer else [])]
    parts += [_CHOSEN] * (program.optimizer_takes in ("low-rank", "muon"))
    parts += [_MAKE[program.optimizer_takes]] if program.optimizer_takes else []
    parts += [*([_DEEPSPEED] if program.deepspeed else []), *([_BLOCKS, _SHARD] if program.fsdp2 else []), body]
    return "\n\n\n".join(part.strip("\n") for part in [*parts, _START]) + "\n"


def _head(program: Program) -> str:
    loop = not program.trainer
    modules = {
        "contextlib": loop and program.ddp,
        "importlib": program.optimizer or program.factory,
        "importlib.util": program.factory,
        "itertools": loop and not program.factory,
        "os": loop or program.alloc_conf,
        "sys": program.factory,
        "tempfile": program.quantised,
    }
    standard = sorted(["argparse", "json", *(name for name, used in modules.items() if used)])
    packages = {"accelerate": program.trainer_fsdp, "deepspeed": program.deepspeed, "peft": program.adapter,
                "safetensors.torch": program.quantised}  # fmt: skip
    others = [name for name, used in packages.items() if used]
    imports = [*(f"import {name}" for name in [*others, "torch"])]
    imports += ["import transformers"] * (not program.factory)
    imports += ["from loss import change"] * program.own_loss
    imports += ["from recompute import recompute"] * program.recompute_some
    imports += ["from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard"] * program.fsdp2
    settings = ["HERE = Path(__file__).resolve().parent", 'RUN = json.loads((HERE / "run.json").read_text())']
    early = [*settings, 'os.environ.setdefault("PYTORCH_ALLOC_CONF", RUN["alloc_conf"])  # before torch is imported', ""]
    late = [] if program.alloc_conf else ["", *settings]
    late += ['SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")'] * (loop and program.deepspeed)
    head = [
        f'"""{program.title}',
        "",
        f"    {program.launch}",
        "",
        "What is trained, and how, is said by the files beside this one.",
        '"""',
        "",
        *(f"import {name}" for name in standard),
        "from pathlib import Path",
        "",
        *(early if program.alloc_conf else []),
        *(f"{line}  # noqa: E402" if program.alloc_conf else line for line in imports),
        *late,
    ]
    return "\n".join(head)


_OPTIONS = """
def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 10, or one pass over --data)")
    parser.add_argument("--random-weights", action="store_true", help="fresh weights: nothing is downloaded")
    parser.add_argument("--data", type=Path, help="lines of text, or JSON lines (.jsonl) with text (default: random samples)")
    return parser.parse_args()
"""


def _model(program: Program) -> str:
    how = '{"dtype": getattr(torch, RUN["dtype"]), "attn_implementation": attention}'
    lines = [
        "def load_model(random_weights):",
        '    """The model with its published weights, or with fresh ones."""',
        '    config = transformers.AutoConfig.from_pretrained(HERE / "config.json")',
        '    auto = getattr(transformers, RUN["class"])',
        "    on_gpu = torch.cuda.is_available()",
        '    attention = RUN["attention"] if on_gpu or RUN["attention"] != "flash_attention_2" else "sdpa"',
        f"    how = {how}",
        '    if not random_weights and RUN["model"] is None:',
        '        raise SystemExit("The folder of the model holds no weights: say --random-weights")',
    ]
    if program.quantised:
        lines += [
            '    packed = transformers.BitsAndBytesConfig(**json.loads((HERE / "quantization.json").read_text()))',
            '    place = {"": torch.cuda.current_device() if on_gpu else "cpu"}',
            "    with tempfile.TemporaryDirectory() as folder:",
            "        if random_weights:  # written once, since weights are packed while they are loaded",
            "            config.save_pretrained(folder)",
            '            safetensors.torch.save_model(auto.from_config(config, **how), f"{folder}/model.safetensors")',
            '        weights = folder if random_weights else RUN["model"]',
            "        model = auto.from_pretrained(weights, config=config, quantization_config=packed, device_map=place, **how)",
        ]
    else:
        lines += [
            "    if random_weights:",
            "        model = auto.from_config(config, **how)",
            "    else:",
            '        model = auto.from_pretrained(RUN["model"], config=config, **how)',
        ]
    if program.frozen:
        lines += [
            "    for name, weight in model.named_parameters():",
            '        if name.startswith(tuple(RUN["frozen"])):',
            "            weight.requires_grad_(False)",
        ]
    if program.adapter:
        lines += [
            '    if RUN["upcast"]:',
            "        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)",
            "    adapter = peft.PeftConfig.from_pretrained(HERE)",
            '    model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=RUN["adapter_in_fp32"])',
        ]
    lines += ["    change(model, RUN)  # its loss and MLPs"] if program.own_loss else []
    lines += ["    return model"]
    return "\n".join(lines)


_FACTORY_OPTIONS = """
def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument("--random-weights", action="store_true", help="for other programs' sake: weights are your function's")
    return parser.parse_args()
"""


def _factory(program: Program) -> str:
    lines = [
        "def load_model():",
        '    """(model, batch function or None, step function or None, type of its floating-point inputs)."""',
        '    of = RUN["factory"]',
        '    sys.path[:0] = of["folders"]',
        '    if of["module"]:',
        '        module = importlib.import_module(of["module"])',
        "    else:",
        "        name = f\"user_{Path(of['file']).stem}\"",
        '        spec = importlib.util.spec_from_file_location(name, of["file"])',
        "        module = sys.modules[name] = importlib.util.module_from_spec(spec)",
        "        spec.loader.exec_module(module)",
        '    made = getattr(module, of["function"])(**of["arguments"])',
        "    model, batch, step = (*(made if isinstance(made, tuple) else (made,)), None, None)[:3]",
        '    dtype = getattr(torch, RUN["dtype"])',
        "    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}",
        "    if kinds == {torch.float32}:",
        "        model.to(dtype)",
        "    elif kinds != {dtype}:  # the function's own choice, and its batches are as it wants them",
        "        dtype = torch.float32",
        '    if hasattr(getattr(model, "config", None), "use_cache"):',
        "        model.config.use_cache = False",
    ]
    if program.frozen:
        lines += [
            "    for name, weight in model.named_parameters():",
            '        if name.startswith(tuple(RUN["frozen"])):',
            "            weight.requires_grad_(False)",
        ]
    lines += ["    return model, batch, step, dtype"]
    return "\n".join(lines) + _FACTORY


_FACTORY = '''


def samples(make_batch, model, micro_batch_size, device, dtype):
    """One micro batch of the function's own; of a transformers model without one, random tokens."""
    if make_batch:
        batch = dict(make_batch(micro_batch_size, RUN["seq_len"]))
    else:
        ids = torch.randint(model.config.get_text_config().vocab_size, (micro_batch_size, RUN["seq_len"]))
        batch = {"input_ids": ids, "labels": ids}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.to(device, dtype if value.dtype == torch.float32 and name != "labels" else value.dtype)
    return batch


def loss_of(model, batch, step):
    """The loss that the model, or the function's step, returns."""
    out = step(model, batch) if step else model(**batch)
    return out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out.loss
'''
_SAMPLES = '''
class Samples(torch.utils.data.Dataset):
    """Random samples of the planned shape, the same every time."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        generator, sample = torch.Generator().manual_seed(index), {}
        for name, of in RUN["sample"].items():
            if isinstance(of, str):
                sample[name] = sample[of].clone()
            elif of["dtype"] == "int64":
                sample[name] = torch.randint(of["low"], of["high"], of["shape"], generator=generator)
            else:
                sample[name] = torch.rand(of["shape"], generator=generator).to(getattr(torch, of["dtype"]))
            if "last" in of:  # the token that ends a sequence
                sample[name][-1] = of["last"]
        return sample
'''

_FILE = '''
def read(file):
    """The lines of a file as samples of the planned length: packed for a language model, else padded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(RUN["model"] or HERE)
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    rows = [json.loads(line) if file.suffix == ".jsonl" else {"text": line} for line in lines]
    length = RUN["seq_len"]
    if RUN["task"] == "causal-lm":
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        tokens = torch.tensor([token for row in rows for token in tokenizer(row["text"])["input_ids"] + end])
        blocks = tokens[: len(tokens) // length * length].view(-1, length)
        if not len(blocks):
            raise SystemExit(f"{file}: {len(tokens)} tokens are fewer than the {length} of one sample")
        return [{"input_ids": block, "labels": block} for block in blocks]
    if RUN["task"] == "seq-classification":
        padded = tokenizer([row["text"] for row in rows], padding="max_length", truncation=True, max_length=length)
        return [
            {name: torch.tensor(values[i]) for name, values in padded.items()} | {"labels": torch.tensor(row["label"])}
            for i, row in enumerate(rows)
        ]
    raise SystemExit(f"--data: write in read() how a line becomes a sample of a {RUN['task']} model")
'''


_OPTIMIZER = '''
def optimizer_class():
    """(class, arguments) as run.json says."""
    module, _, name = RUN["optimizer"]["class"].rpartition(".")
    return getattr(importlib.import_module(module), name), RUN["optimizer"]["arguments"]
'''
_CHOSEN = '''
def chosen(model):
    """(matrices that run.json chooses by their names, the others), of the weights that train; no embedding is a matrix."""
    words = RUN["optimizer"]["matrices"]
    tables = {id(part.weight) for part in model.modules() if "Embedding" in type(part).__name__ and hasattr(part, "weight")}
    found = [], []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_matrix = weight.dim() == 2 and id(weight) not in tables
            is_named = any(word in name for word in words.get("with", words.get("without")))
            found[0 if is_matrix and is_named == ("with" in words) else 1].append(weight)
    return found
'''
_MAKE = {
    "names": '''
def make_optimizer(model):
    """It goes by the names of the weights."""
    kind, arguments = optimizer_class()
    return kind([(name, weight) for name, weight in model.named_parameters() if weight.requires_grad], **arguments)
''',
    "low-rank": '''
def make_optimizer(model):
    """The gradients of the chosen matrices are projected."""
    kind, arguments = optimizer_class()
    matrices, others = chosen(model)
    return kind([{"params": others}, {"params": matrices, **RUN["optimizer"]["group"]}], **arguments)
''',
    "muon": '''
class Both:
    """Muon for the chosen matrices, and AdamW for what is no matrix, an embedding or a head."""

    def __init__(self, model):
        kind, arguments = optimizer_class()
        matrices, others = chosen(model)
        self.parts = [kind(matrices, **arguments), torch.optim.AdamW(others, **arguments)]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


make_optimizer = Both
''',
    "blocks": '''
def make_optimizer(model):
    """One block of layers trains at a time, from the first on, whose backward is the longest."""
    kind, arguments = optimizer_class()
    inside = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], **arguments)
    return kind(inside, list(model.named_parameters()), switch_mode="ascending", verbose=0)
''',
}
_DEEPSPEED = '''
def read_deepspeed(name):
    """DeepSpeed's file; without a GPU its processes talk by gloo, and nothing is used that it would have to compile."""
    config = json.loads((HERE / name).read_text())
    if not torch.cuda.is_available():
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
        config["zero_force_ds_cpu_optimizer"] = False
        if config.get("optimizer", {}).get("type") in ("Adam", "AdamW"):
            config["optimizer"]["params"]["torch_adam"] = True
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    return config
'''
_BLOCKS = '''
def blocks_of(model):
    """The model's layers: the longest list of modules of one class, or the modules of the classes that run.json names."""
    if RUN["blocks"]:
        return [part for part in model.modules() if type(part).__name__ in RUN["blocks"]]
    lists = [list(part) for part in model.modules() if isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential))]
    return max((blocks for blocks in lists if len({type(block) for block in blocks}) == 1), key=len, default=[])
'''
_SHARD = '''
def shard(model):
    """`fully_shard` on every block, then on the rest."""
    settings = RUN["fsdp"]
    world, copies = torch.distributed.get_world_size(), settings["copies"]
    names = {name: getattr(torch, dtype) for name, dtype in settings["dtypes"].items()}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, dims = ((copies, world // copies), ("replicate", "shard")) if copies > 1 else ((world,), ("shard",))
    how = {
        "mesh": torch.distributed.device_mesh.init_device_mesh(kind, sizes, mesh_dim_names=dims),
        "mp_policy": MixedPrecisionPolicy(**names),
        "reshard_after_forward": settings["reshard_after_forward"],
    }
    if settings["cpu_offload"]:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=kind == "cuda" and settings["pin_memory"])
    for block in blocks_of(model):
        fully_shard(block, **how)
    fully_shard(model, **how)
'''
_START = """
if __name__ == "__main__":
    main()
"""


def _trainer(program: Program) -> str:
    lines = [
        "def main():",
        "    options = parse()",
        '    settings = json.loads((HERE / "training_args.json").read_text())',
        *(['    settings["deepspeed"] = read_deepspeed(settings["deepspeed"])'] if program.deepspeed else []),
        "    steps = options.steps or (-1 if options.data else 10)",
        "    arguments = transformers.TrainingArguments(**settings, max_steps=steps, use_cpu=not torch.cuda.is_available())",
        *(_CPU_FSDP if program.trainer_fsdp else []),
        "    model = load_model(options.random_weights)  # after the arguments, which may say that it is partitioned",
        *(['    recompute(model, RUN["recompute"])'] if program.recompute_some else []),
        "    data = read(options.data) if options.data else Samples()",
        f"    trainer = transformers.Trainer({', '.join(_TRAINER_ARGUMENTS[: 3 + program.optimizer])})",
        "    trainer.train()",
        *(_END if program.processes else []),
    ]
    return "\n".join(lines)


_END = ["    if torch.distributed.is_initialized():", "        torch.distributed.destroy_process_group()"]
_CPU_FSDP = [
    "    if not torch.cuda.is_available():  # where accelerate would run DDP instead",
    '        state = {"distributed_type": accelerate.DistributedType.MULTI_GPU, "device": torch.device("cpu")}',
    "        for name, value in state.items():",
    "            accelerate.PartialState._shared_state[name] = value",
]
_TRAINER_ARGUMENTS = ("model=model", "args=arguments", "train_dataset=data", "optimizer_cls_and_kwargs=optimizer_class()")


def _loop(program: Program) -> str:
    many = program.processes
    lines = [
        "def main():",
        "    options = parse()",
        "    torch.manual_seed(0)  # every process makes the same weights",
        "    on_gpu = torch.cuda.is_available()",
        "    device = torch.device(f\"cuda:{os.environ.get('LOCAL_RANK', '0')}\" if on_gpu else \"cpu\")",
        "    if on_gpu:",
        "        torch.cuda.set_device(device)",
    ]
    if program.deepspeed:
        lines += [
            '    config = read_deepspeed("ds_config.json")',
            "    micro_batch_size, accumulated = (config[key] for key in SIZES)",
        ]
        if not program.factory:
            lines += ['    partitioned = transformers.integrations.HfDeepSpeedConfig(config) if RUN["zero_init"] else None']
    else:
        lines += ['    micro_batch_size, accumulated = RUN["micro_batch_size"], RUN["grad_accum_steps"]']
        if many:
            lines += ['    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")']
    if program.factory:
        if program.deepspeed:
            lines += [
                '    importlib.import_module("torch._dynamo")  # a checkpoint needs it, and DeepSpeed patches what it reads'
            ]
            lines += ['    with deepspeed.zero.Init(config_dict_or_path=config, enabled=RUN["zero_init"]):']
        lines += ["    " * program.deepspeed + "    model, make_batch, step, dtype = load_model()", "    model.train()"]
    else:
        lines += ["    model = load_model(options.random_weights)", "    model.config.use_cache = False", "    model.train()"]
        if program.deepspeed:
            lines += ["    del partitioned  # it had to be there while the model was made"]
    if program.recompute_all:
        lines += ['    model.gradient_checkpointing_enable({"use_reentrant": RUN["recompute"]["reentrant"]})']
    if program.recompute_some and program.recompute_whole:
        lines += [
            '    if getattr(model, "supports_gradient_checkpointing", False):  # a model of transformers',
            '        model.gradient_checkpointing_enable({"use_reentrant": RUN["recompute"]["reentrant"]})',
            "    else:",
            '        recompute(model, RUN["recompute"])',
        ]
    elif program.recompute_some:
        lines += ['    recompute(model, RUN["recompute"])']
    trained = "[weight for weight in model.parameters() if weight.requires_grad]"
    told = 'print(f"step {number // accumulated} of {steps}: loss {loss.item():.4f}", flush=True)'
    if program.deepspeed:
        lines += _DEEPSPEED_ENGINE[program.optimizer]
    else:
        lines += ["    shard(model)"] if program.fsdp2 else ["    model.to(device)"]
        lines += ["    kind, arguments = optimizer_class()"] if not program.optimizer_takes else []
        if program.release:
            lines += [
                f"    optimizers = {{weight: kind([weight], **arguments) for weight in {trained}}}",
                "",
                "    def step_and_drop(weight):",
                "        optimizers[weight].step()",
                "        weight.grad = None",
                "",
                "    for weight in optimizers:",
                "        weight.register_post_accumulate_grad_hook(step_and_drop)",
            ]
        elif program.optimizer_takes:
            lines += ["    optimizer = make_optimizer(model)"]
        else:
            lines += [f"    optimizer = kind({trained}, **arguments)"]
        lines += ["    optimizer.train()  # it keeps two sets of weights"] if program.optimizer_modes else []
        if program.ddp:
            lines += ["    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device] if on_gpu else None)"]
    if program.factory:
        lines += ['    torch.manual_seed(int(os.environ.get("RANK", "0")))  # every process makes other batches'] * many
        lines += [
            "    steps = options.steps",
            "    for number in range(1, steps * accumulated + 1):",
            "        batch = samples(make_batch, model, micro_batch_size, device, dtype)",
        ]
    else:
        lines += [
            "    data = read(options.data) if options.data else Samples()",
            "    sampler = torch.utils.data.DistributedSampler(data)"
            if many
            else "    sampler = torch.utils.data.RandomSampler(data)",
            "    batches = torch.utils.data.DataLoader(data, micro_batch_size, sampler=sampler, drop_last=True)",
            "    steps = options.steps or (len(batches) // accumulated if options.data else 10)",
            "    for number, batch in enumerate(itertools.islice(batches, steps * accumulated), 1):",
            "        batch = {name: tensor.to(device) for name, tensor in batch.items()}",
        ]
    called = "engine" if program.deepspeed else "model"
    forward = f"loss = loss_of({called}, batch, step)" if program.factory else f"loss = {called}(**batch).loss"
    if program.deepspeed:
        lines += [f"        {forward}", "        engine.backward(loss)", "        engine.step()"]
        report = "        if number % accumulated == 0 and engine.global_rank == 0:"
    else:
        lines += ["        last = number % accumulated == 0"] if not program.release else []
        if program.fsdp2:
            lines += ["        model.set_requires_gradient_sync(last)"]
        indent = "        "
        if program.ddp:
            lines += ["        with contextlib.nullcontext() if last else model.no_sync():"]
            indent += "    "
        if program.autocast:
            lines += [f'{indent}with torch.autocast(device.type, getattr(torch, RUN["autocast"])):', f"{indent}    {forward}"]
        else:
            lines += [indent + forward]
        if program.release:
            lines += [f"{indent}loss.backward()"]
            report = ""
        else:
            lines += [f"{indent}(loss / accumulated).backward()", "        if not last:", "            continue"]
            if program.clips:
                lines += ['        torch.nn.utils.clip_grad_norm_(model.parameters(), RUN["clip_grad_norm"])']
            lines += ["        optimizer.step()", "        optimizer.zero_grad()"]
            report = "        if torch.distributed.get_rank() == 0:" if many else ""
    lines += [report] if report else []
    lines += [("    " if report else "") + "        " + told]
    if many:
        lines += ["    torch.distributed.destroy_process_group()"]
    return "\n".join(lines)


_DEEPSPEED_ENGINE = {
    False: ["    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)"],
    True: [
        "    kind, arguments = optimizer_class()",
        "    own = kind([weight for weight in model.parameters() if weight.requires_grad], **arguments)",
        "    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)",
    ],
}
