"""The head of a draft model that proposes only some tokens: rows for these alone, and which tokens they are.

Most of what a small model computes is its head, and most of a text is made of few tokens (FR-Spec, arXiv
2502.14856; EAGLE-3, arXiv 2503.01840). The file lies beside the weights of a whole model, which any loader
takes without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.spec import DecoderSpec

REDUCED_HEAD_FILE = "draft_head.safetensors"
_TOKEN_IDS, _WEIGHT = "token_ids", "weight"


@dataclass(frozen=True, slots=True)
class ReducedHead:
    """Rows of a head for some tokens.

    Args:
        token_ids: (C,), int64, ascending: the token that each row is for.
        weight: (C, width).
    """

    token_ids: Tensor
    weight: Tensor

    def below(self, end_id: int) -> ReducedHead:
        """The rows for tokens before `end_id`."""
        num_rows = int((self.token_ids < end_id).sum())
        return ReducedHead(self.token_ids[:num_rows], self.weight[:num_rows])

    def save(self, folder: Path) -> None:
        """Write the file.

        Raises:
            OSError, SafetensorError: it can't be written.
        """
        tensors = {_TOKEN_IDS: self.token_ids.int().contiguous(), _WEIGHT: self.weight.contiguous()}
        save_file(tensors, folder / REDUCED_HEAD_FILE)


def read_reduced_head(folder: Path, spec: DecoderSpec) -> ReducedHead | None:
    """What a draft model's folder holds of it; None where the whole head proposes.

    Args:
        spec: of the model in the folder.

    Raises:
        ModelLoadError: the file is damaged, or does not belong to this model.
    """
    path = folder / REDUCED_HEAD_FILE
    if not path.is_file():
        return None
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}: make the draft model anew") from error
    if tensors.keys() != {_TOKEN_IDS, _WEIGHT}:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise ModelLoadError(f"{path} holds {found}: a reduced head is {_TOKEN_IDS} and {_WEIGHT}")
    token_ids, weight = tensors[_TOKEN_IDS], tensors[_WEIGHT]
    for fault in _faults(token_ids, weight, spec):
        raise ModelLoadError(f"{path}: {fault}")
    return ReducedHead(token_ids.long(), weight)


def _faults(token_ids: Tensor, weight: Tensor, spec: DecoderSpec) -> Iterator[str]:
    """What is wrong, the first of it first: what comes later is looked at only if that is right."""
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.dim() != 1 or not token_ids.numel():
        yield f"{_TOKEN_IDS} must be a list of int32, one at least, not {_shown(token_ids)}"
    if not weight.is_floating_point() or weight.dim() != 2:
        yield f"{_WEIGHT} must be a matrix of floating-point numbers, not {_shown(weight)}"
    if weight.shape[0] != token_ids.shape[0]:
        yield f"{_WEIGHT} has {weight.shape[0]} rows for {token_ids.shape[0]} {_TOKEN_IDS}: one each is right"
    if weight.shape[1] != spec.hidden_size:
        yield f"{_WEIGHT} is {weight.shape[1]} wide, and the model beside it {spec.hidden_size}"
    is_out_of_order = token_ids[1:] <= token_ids[:-1]
    if bool(is_out_of_order.any()):
        place = int(is_out_of_order.int().argmax())
        before, behind = token_ids[place : place + 2].tolist()
        yield f"{_TOKEN_IDS} must ascend, each there once: {behind} follows {before}"
    for end in (int(token_ids[0]), int(token_ids[-1])):
        if not 0 <= end < spec.vocab_size:
            yield f"token {end} is none of the model's, which are 0 to {spec.vocab_size - 1}"
    if not bool(torch.isfinite(weight).all()):
        yield f"{_WEIGHT} holds a value that is not finite"


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
