"""The draft model while it learns: the target's first layers, with its embedding, final norm and head.

It is a model of transformers, so that it can be taught by torch's own means, and saved as any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headrace.engine.errors import ConfigError, ModelLoadError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


class Student:
    """A model that learns.

    Raises:
        ConfigError: the target has fewer layers than are wanted.
        ModelLoadError: transformers can't make a smaller model of the target's family.
    """

    def __init__(self, target: Path, num_layers: int) -> None:
        self._target = target
        config = _cut_config(target, num_layers)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, KeyError) as error:
            raise ModelLoadError(f"transformers makes no smaller model of {target}: {error}") from error
        self.model: PreTrainedModel = model
        _fill(model, target)
        self._body: nn.Module = model.base_model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        for frozen in (embedding, head):
            frozen.requires_grad_(False)
        self._head: Tensor = head.weight

    @property
    def num_parameters(self) -> int:
        """Embedding and head included, once where they are one."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def learning(self) -> list[nn.Parameter]:
        """What changes while it learns: its layers and the final norm."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """(C, width): the head's rows of some tokens."""
        return self._head[token_ids]

    def hidden(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """What its head gets.

        Args:
            token_ids: (B, T), int64.
            mask: (B, T), whether a place holds a token.

        Returns:
            (B, T, width).
        """
        states: Tensor = self._body(input_ids=token_ids, attention_mask=mask.long(), use_cache=False)[0]
        return states

    def state(self) -> dict[str, Tensor]:
        """What it has learnt."""
        return {
            name: parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in state.items():
                parameters[name].copy_(value)

    def save(self, folder: Path) -> None:
        """Write a model folder that any loader takes, in bfloat16, with the target's tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        learnt = self.model.state_dict()
        config = self.model.config
        saved = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        saved.load_state_dict(learnt)
        saved.save_pretrained(folder)
        for name in _TOKENIZER_FILES:
            if (self._target / name).is_file():
                shutil.copyfile(self._target / name, folder / name)


def _cut_config(target: Path, num_layers: int) -> Any:
    config = AutoConfig.from_pretrained(str(target), trust_remote_code=False, local_files_only=True)
    config = config.get_text_config()
    if num_layers >= config.num_hidden_layers:
        raise ConfigError(
            f"the target has {config.num_hidden_layers} layers: a draft model of {num_layers} would be no "
            f"smaller; use {max(1, config.num_hidden_layers // 10)} or so"
        )
    for name, value in list(vars(config).items()):
        # What is listed layer by layer: kinds of attention, of MLP, of position.
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = num_layers
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = min(config.max_window_layers, num_layers)
    return config


def _fill(model: PreTrainedModel, target: Path) -> None:
    """Give the model every tensor of its that the target has.

    Raises:
        ModelLoadError: one is missing.
    """
    wanted = {name for name, _ in model.named_parameters()}
    stored = {name: tensor for name, tensor in _stored(target) if name in wanted}
    missing = sorted(wanted - stored.keys())
    if missing:
        raise ModelLoadError(f"{target} has no tensor {missing[0]}, which its first layers need")
    model.load_state_dict(stored, strict=False)
    model.tie_weights()


def _stored(target: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file is no mapping
                yield name, file.get_tensor(name).float()
