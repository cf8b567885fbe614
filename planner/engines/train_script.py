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
    frozen: bool = False
    alloc_conf: bool = False
    """run.json says PYTORCH_ALLOC_CONF."""
    adapter: bool = False
    """A peft configuration lies beside it."""
    deepspeed: bool = False
    quantised: bool = False
    """A bitsandbytes configuration lies beside it."""
    optimizer: bool = False
    """run.json names the optimizer's class."""


def text_of(program: Program) -> str:
    """train.py, whole."""
    body = _trainer(program)
    parts = [_head(program), _OPTIONS, _model(program), _SAMPLES, _FILE, body]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _head(program: Program) -> str:
    standard = ["argparse", "json", *(["importlib"] if program.optimizer else []), *(["os"] if program.alloc_conf else []),
                *(["tempfile"] if program.quantised else [])]  # fmt: skip
    others = [
        *(["import deepspeed"] if program.deepspeed else []),
        *(["import peft"] if program.adapter else []),
        "import torch",
        "import transformers",
    ]
    settings = ["HERE = Path(__file__).resolve().parent", 'RUN = json.loads((HERE / "run.json").read_text())']
    early = [*settings, 'os.environ.setdefault("PYTORCH_ALLOC_CONF", RUN["alloc_conf"])  # before torch is imported', ""]
    return "\n".join([
        f'"""{program.title}',
        "",
        f"    {program.launch}",
        "",
        "What is trained, and how, is said by the files beside this one.",
        '"""',
        "",
        *(f"import {name}" for name in sorted(standard)),
        "from pathlib import Path",
        "",
        *(early if program.alloc_conf else []),
        *(f"{line}  # noqa: E402" if program.alloc_conf else line for line in others),
        *([] if program.alloc_conf else ["", *settings]),
    ])  # fmt: skip


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
            "            auto.from_config(config, **how).save_pretrained(folder)",
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
    lines += ["    return model"]
    return "\n".join(lines)


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


def _trainer(program: Program) -> str:
    chosen = ", optimizer_cls_and_kwargs=optimizer()" if program.optimizer else ""
    text = _OPTIMIZER if program.optimizer else ""
    deepspeed = _TRAINER_DEEPSPEED if program.deepspeed else ""
    text += _DEEPSPEED if program.deepspeed else ""
    return (
        text
        + f"""
def main():
    options = parse()
    settings = json.loads((HERE / "training_args.json").read_text())
{deepspeed}    steps = options.steps or (-1 if options.data else 10)
    arguments = transformers.TrainingArguments(**settings, max_steps=steps, use_cpu=not torch.cuda.is_available())
    model = load_model(options.random_weights)
    data = read(options.data) if options.data else Samples()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data{chosen})
    trainer.train()


if __name__ == "__main__":
    main()
"""
    )


_TRAINER_DEEPSPEED = """\
    settings["deepspeed"] = read_deepspeed(settings["deepspeed"])
"""
_DEEPSPEED = '''
def read_deepspeed(name):
    """DeepSpeed's file; without a GPU its processes talk by gloo, and nothing is used that it would have to compile."""
    config = json.loads((HERE / name).read_text())
    if not torch.cuda.is_available():
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        config["zero_force_ds_cpu_optimizer"] = False
        if config.get("optimizer", {}).get("type") in ("Adam", "AdamW"):
            config["optimizer"]["params"]["torch_adam"] = True
    return config


'''
_OPTIMIZER = '''
def optimizer():
    """(class, arguments) as run.json says."""
    module, _, name = RUN["optimizer"]["class"].rpartition(".")
    return getattr(importlib.import_module(module), name), RUN["optimizer"]["arguments"]


'''
