"""Ways to edit a model folder, to damage it or to make it look like an older one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


@contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """Give a file's object to be changed, and write it back."""
    fields = json.loads(path.read_text())
    yield fields
    path.write_text(json.dumps(fields))


@contextmanager
def edited_tensors(path: Path) -> Iterator[dict[str, Tensor]]:
    """Give a safetensors file's tensors to be changed, and write them back."""
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path, metadata={"format": "pt"})
