"""`memplan optimizers list|show`: which optimizers are known, and what each keeps."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .entry import Entry

_WIDTH, _ROWS = 4096, 4096  # of the weight that the figures are for


def add_commands(commands: Any) -> None:
    """Adds `optimizers` to the sub-parsers of the command line."""
    parser = commands.add_parser(
        "optimizers", help="which optimizers are known, and what each keeps", description="What --optimizer can name."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all of them, with the state of a 4096 x 4096 weight in bytes per parameter")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)
    show = actions.add_parser("show", help="one of them: formulas, options, source, what it cannot be combined with")
    show.add_argument("name", metavar="NAME", help="as --optimizer spells it, or as transformers' Trainer does")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=run_show)


def run_list(args: argparse.Namespace) -> int:
    from .catalogue import entries

    if args.json:
        import json

        print(json.dumps([as_data(entry) for entry in entries().values()], indent=2))
        return 0
    print(f"{'name':<22} {'library':<14} {'bf16':>7} {'fp32':>7}  state, in bytes per parameter")
    for entry in entries().values():
        bf16, fp32 = (_figure(state_per_parameter(entry, dtype)) for dtype in ("bfloat16", "float32"))
        print(f"{entry.name:<22} {entry.library:<14} {bf16:>7} {fp32:>7}  {entry.state}")
    print(
        "\nbf16, fp32: of a 4096 x 4096 weight of that dtype, without its gradient; -: refused.  s: bytes of one element of the"
    )
    print(
        "parameter, g: of its gradient, r: rank, mn, mx: the smaller and larger side.  `memplan optimizers show NAME` says more"
    )
    return 0


def run_show(args: argparse.Namespace) -> int:
    from .catalogue import entry_of

    entry = entry_of(args.name)
    if args.json:
        import json

        print(json.dumps(as_data(entry), indent=2))
        return 0
    print(f"{entry.name}  {entry.summary}")
    figures = [f"{dtype} {_figure(state_per_parameter(entry, dtype))}" for dtype in ("bfloat16", "float32")]
    rows = [
        ("library", f"{entry.library} {entry.version}"),
        ("state", f"{entry.state}  (bytes per parameter; a 4096 x 4096 weight: {', '.join(figures)})"),
        ("step", entry.transient),
        ("source", entry.source),
        ("checked", f"against the library: {entry.checked}"),
        ("options", ", ".join(f"{o.name}={_shown(o.default)}" for o in entry.options.values()) or "none"),
        ("also called", ", ".join(entry.aliases) or "-"),
    ]
    for label, text in rows:
        print(f"  {label:<12} {text}")
    for number, text in enumerate(entry.not_with):
        print(f"  {'not with' if number == 0 else '':<12} {text}")
    return 0


def as_data(entry: Entry) -> dict[str, Any]:
    """The entry as JSON data; `state_bytes_per_parameter` is of a 4096 x 4096 weight, null where it is refused."""
    return {
        "name": entry.name,
        "library": entry.library,
        "version": entry.version,
        "summary": entry.summary,
        "state": entry.state,
        "state_bytes_per_parameter": {dtype: state_per_parameter(entry, dtype) for dtype in ("bfloat16", "float32")},
        "transient": entry.transient,
        "options": {option.name: option.default for option in entry.options.values()},
        "not_with": list(entry.not_with),
        "aliases": list(entry.aliases),
        "checked": entry.checked,
        "source": entry.source,
    }


def state_per_parameter(entry: Entry, dtype: str) -> float | None:
    """State of a 4096 x 4096 weight of an MLP, in bytes per parameter; None where the library refuses it.  Needs no torch."""
    from ...errors import UserError
    from .catalogue import TORCH_COPIES
    from .rule import OptimizerTensor

    weight = OptimizerTensor((_ROWS, _WIDTH), dtype, name="model.layers.0.mlp.down_proj.weight", module_class="Linear")
    size = weight.nbytes // weight.numel
    if entry.rule is None:
        copies = TORCH_COPIES.get(entry.name)
        return float(copies * size) if copies is not None else size * (_ROWS + _WIDTH) / weight.numel
    if entry.per_parameter is not None:
        return entry.per_parameter
    if entry.copies is not None:
        return float(entry.copies * size)
    try:
        return entry.make({}).step([weight]).state_bytes / weight.numel
    except UserError:
        return None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}".rstrip("0").rstrip(".")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
