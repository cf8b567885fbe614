"""What a training script must know of a model that a function of the user's makes: where it is, and what it is given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ...models.sources import package_root, uses_relative_imports
from .model_write import stored_dtype

if TYPE_CHECKING:
    from ..request import Request


def factory_of(request: Request) -> dict[str, Any]:
    """The part of run.json that is about the model; the function is imported from where it lies.

    Raises CannotTell for arguments that JSON cannot hold, and for an adapter.
    """
    ref = request.model.factory
    assert ref is not None
    if request.adapter_settings is not None:
        raise CannotTell(f"train.py: an adapter on the model of {ref} is for your own program to put there")
    try:
        kwargs = json.loads(json.dumps(dict(ref.kwargs)))
    except (TypeError, ValueError) as error:
        raise CannotTell(f"train.py: the arguments of {ref} are no JSON: {error}") from error
    root, dotted = package_root(ref.path)
    module = None
    if ref.module is not None:
        folders, module = [ref.path.parents[ref.module.count(".") + (ref.path.stem == "__init__")]], ref.module
    elif "." in dotted and uses_relative_imports(ref.path):
        folders, module = [root], dotted
    else:  # a script: its own folder comes first
        folders = list(dict.fromkeys([ref.path.parent, root]))
    return {
        "factory": {
            "file": str(ref.path),
            "module": module,
            "folders": [str(folder) for folder in folders],
            "function": ref.function,
            "arguments": kwargs,
        },
        "dtype": stored_dtype(request),
        "seq_len": request.seq_len,
        **({"frozen": list(request.frozen)} if request.frozen else {}),
    }
