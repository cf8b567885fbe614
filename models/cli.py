"""`memplan models list` and `memplan models show`: what is known by name, and what one model is."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..errors import UserError, did_you_mean

if TYPE_CHECKING:
    from .catalogue import Entry
    from .spec import ModelSpec


def add_commands(commands: Any) -> None:
    """Adds `models` with its own sub-commands to the sub-parsers of the command line."""
    models = commands.add_parser("models", help="the models known by name, and what one model is")
    inner = models.add_subparsers(dest="models_command", metavar="COMMAND", required=True, parser_class=type(models))

    every = inner.add_parser("list", help="the catalogue as a table")
    every.add_argument(
        "--family", metavar="NAME", help="only this family: a model_type such as llama, or a group such as encoders"
    )
    every.add_argument("--json", action="store_true", help="print JSON")
    every.set_defaults(run=_list)

    show = inner.add_parser("show", help="one model: parameters, task, positions, config")
    show.add_argument("name", metavar="MODEL", help="a name, a folder, a config.json, FILE.py:FUNCTION, or an id on the hub")
    show.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change a config value (may be repeated)")
    show.add_argument("--task", help="what it is trained for, instead of the default")
    show.add_argument("--trust-remote-code", action="store_true", help="allow the model's own Python code to run")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)


def _list(args: argparse.Namespace) -> int:
    from . import catalogue
    from .summary import human_params, summarize

    chosen = _in_family(catalogue.groups(), args.family)
    rows = []
    for entry in chosen:
        facts = summarize(entry.config)
        rows.append({"name": entry.id, "family": entry.config["model_type"], "task": entry.task, "num_params": entry.num_params,
                     "layers": facts.layers, "hidden_size": facts.hidden_size, "num_heads": facts.num_heads,
                     "vocab_size": facts.vocab_size, "aliases": list(entry.aliases)})  # fmt: skip
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    heads = ("name", "params", "layers", "hidden", "heads", "vocab", "task")
    keys = ("name", "num_params", "layers", "hidden_size", "num_heads", "vocab_size", "task")
    cells = [[human_params(r[k]) if k == "num_params" else str(r[k] if r[k] is not None else "-") for k in keys] for r in rows]
    _print_table([list(heads), *cells], right={1, 2, 3, 4, 5})
    print(f"\n{len(rows)} models. Any other: a folder or config.json, FILE.py:FUNCTION, or an id on the Hugging Face hub.")
    return 0


def _in_family(groups: dict[str, tuple[Entry, ...]], family: str | None) -> list[Entry]:
    every = [entry for group in groups.values() for entry in group]
    if family is None:
        return every
    wanted = family.lower()
    chosen = [e for e in every if e.config["model_type"] == wanted] or list(groups.get(wanted, ()))
    if not chosen:
        known = {e.config["model_type"] for e in every} | set(groups)
        raise UserError(f"--family: no models of the family {family!r} in the catalogue",
                        did_you_mean(wanted, known) or f"Choose one of {', '.join(sorted(known))}")  # fmt: skip
    return chosen


def _print_table(rows: list[list[str]], right: set[int]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())


def _show(args: argparse.Namespace) -> int:
    from . import catalogue
    from .overrides import parse_settings
    from .reference import load
    from .summary import human_params, summarize

    spec = load(args.name, task=args.task, overrides=parse_settings(args.set), trust_remote_code=args.trust_remote_code)
    entry = catalogue.find(args.name)
    default_task = entry is not None and entry.task == spec.task and not args.set
    count, notes = (spec.num_params, list(spec.notes)) if default_task else _count(spec)
    answer = {"name": spec.name, "source": spec.source, "task": spec.task, "num_params": count, "max_seq_len": spec.max_seq_len,
              "fingerprint": spec.fingerprint, "notes": notes, "config": spec.config}  # fmt: skip
    if entry is not None and not args.set:
        answer["published"] = {"value": entry.published, "by": entry.published_by}
    if spec.factory is not None:
        answer["factory"] = {
            "path": str(spec.factory.path),
            "function": spec.factory.function,
            "kwargs": dict(spec.factory.kwargs),
        }
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    lines = [("model", f"{spec.name} ({spec.source})"), ("parameters", f"{count:,} ({human_params(count)})")]
    if "published" in answer:
        assert entry is not None
        lines.append(("published", f"{entry.published} ({entry.published_by})"))
    lines.append(("task", spec.task))
    if spec.config is not None:
        facts = summarize(spec.config)
        shape = {"layers": facts.layers, "hidden": facts.hidden_size, "heads": facts.num_heads, "kv heads": facts.num_kv_heads,
                 "vocab": facts.vocab_size}  # fmt: skip
        lines.append(("shape", ", ".join(f"{k} {v}" for k, v in shape.items() if v is not None)))
        lines.append(("positions", f"{spec.max_seq_len} tokens" if spec.max_seq_len is not None else "no limit in the config"))
    else:
        assert spec.factory is not None
        lines.append(("factory", str(spec.factory)))
    lines += [("note", note) for note in notes]
    for name, value in lines:
        print(f"{name:<11} {value}")
    if spec.config is not None:
        print("config")
        for key, value in spec.config.items():
            print(f"  {key} = {json.dumps(value)}")
    return 0


def _count(spec: ModelSpec) -> tuple[int, list[str]]:
    """The parameters of what `build` makes, without memory for them, and what it had to note."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .builder import build, num_params

    with FakeTensorMode():
        built = build(spec, dtype=torch.float32)
        return num_params(built.module), built.notes
