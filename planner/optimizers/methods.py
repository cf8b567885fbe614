"""Methods that an optimizer is: GaLore, APOLLO, LOMO, BAdam and HiFT train the model's own weights by an optimizer of theirs.

`--method galore --optimizer adamw-8bit` and `--optimizer galore-adamw-8bit` are two words for one run.  BAdam and HiFT train
one block of layers at a time, so there the method also says which parameters have gradients (`dearest_block`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import UserError

LAYERWISE = ("badam", "hift")  # one block of layers at a time
# method -> what is asked for -> the optimizer that runs; the first is the default.
OPTIMIZERS: dict[str, dict[str, str]] = {
    "galore": {
        "adamw": "galore-adamw",
        "adamw-8bit": "galore-adamw-8bit",
        "adafactor": "galore-adafactor",
        "hf-adafactor": "galore-adafactor",
    },
    "apollo": {"adamw": "apollo-adamw", "apollo-mini": "apollo-mini"},
    "lomo": {"sgd": "lomo", "adalomo": "adalomo"},
    "badam": {"adamw": "badam"},
    "hift": {"adamw": "hift"},
}
METHODS = tuple(OPTIMIZERS)


def default_optimizer(method: str) -> str:
    return next(iter(OPTIMIZERS[method].values()))


def method_of(optimizer: str) -> str | None:
    """The method that an optimizer cannot be without: "badam" for badam."""
    name = optimizer.partition(":")[0]
    return next((method for method in LAYERWISE if name in OPTIMIZERS[method].values()), None)


def optimizer_under(method: str, asked: str) -> str:
    """The optimizer that runs when `asked` is asked for under `method`; options stay.  Raises UserError for none."""
    if method not in OPTIMIZERS:
        return asked
    known = OPTIMIZERS[method]
    name, colon, options = asked.partition(":")
    if name in known.values():
        return asked
    if name in known:
        return f"{known[name]}{colon}{options}"
    choices = ", ".join(dict.fromkeys([*known, *known.values()]))
    raise UserError(f"--method {method} with --optimizer {name}: it has none of that name", f"Choose one of {choices}")


def dearest_block(method: str, sizes: Mapping[str, int]) -> tuple[Sequence[str], str]:
    """(names of the parameters of the block whose step needs most, what it is in words).

    `sizes`: bytes of every parameter.  Every block trains in turn, so the largest decides; of equal ones the first, since
    backward goes down to the block that trains and the first lies deepest.  Raises UserError where the library makes no block.
    """
    from . import badam, hift

    divided = {"badam": badam.blocks, "hift": hift.blocks}[method](list(sizes))
    if not divided:
        raise UserError(
            f"--method {method}: it finds no layers in this model (it looks for `layers.N.` in the names of parameters)",
            "Use --method hift, or full" if method == "badam" else "Use --method full",
        )
    largest = max(divided, key=lambda block: sum(sizes[name] for name in block))
    number = divided.index(largest) + 1
    return largest, (
        f"{method} trains one of {len(divided)} blocks at a time; shown is the largest, number {number} "
        f"({largest[0]}{f' to {largest[-1]}' if len(largest) > 1 else ''})"
    )
