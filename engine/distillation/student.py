"""The draft model while it learns: the target's first layers, with its embedding, final norm and head.

It is a model of transformers, so that it can be taught by torch's own means, and saved as any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as tell

from headrace.engine.errors import ConfigError, DraftingFailed, ModelLoadError
from headrace.engine.models.loader import read_spec
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE, ReducedHead

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

_LISTED_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Settings of an architecture that hold an entry for each layer."""


class Student:
    """A model that learns.

    Raises:
        ConfigError: the target has fewer layers than are wanted.
        ModelLoadError: transformers can't make a smaller model of the target's family.
    """

    def __init__(self, target: Path, num_layers: int) -> None:
        self._target = target
        _, self._spec = read_spec(target)
        try:
            config = _cut_config(target, num_layers)
            with _quiet():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    str(target),
                    config=config,
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
            raise ModelLoadError(f"transformers makes no smaller model of {target}: {error}") from error
        model, told = loaded
        if faults := sorted(map(str, {*told["missing_keys"], *told["mismatched_keys"]})):
            raise ModelLoadError(f"{target} has no tensor {faults[0]} as its first layers need it")
        # Nothing is dropped at random: it learns too shortly to learn anything by heart.
        self.model: PreTrainedModel = model.eval()
        self._body: nn.Module = model.base_model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        # A head that is stored beside the embedding it should be tied to, and differs from it, counts.
        model.config.tie_word_embeddings = head.weight is embedding.weight
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

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """What the head makes of `hidden`, the target's as well as its own, for some tokens.

        Args:
            hidden: (..., width).
            rows: (C, width), see `head_rows`.

        Returns:
            (..., C), fp32.
        """
        logits = F.linear(hidden.to(rows.dtype), rows).float() / self._spec.logits_divisor
        cap = self._spec.logits_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

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

    def save(self, folder: Path, vocabulary: Tensor | None = None) -> None:
        """Write a model folder that any loader takes, in bfloat16, with the target's tokenizer.

        Args:
            vocabulary: (C,), int64, ascending: the tokens that it proposes, by a reduced head of their own;
                None leaves it the whole one.

        Raises:
            DraftingFailed: it can't be written.
        """
        with _quiet():
            saved = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
            saved.load_state_dict(self.model.state_dict())
            try:
                folder.mkdir(parents=True, exist_ok=True)
                saved.save_pretrained(folder)
                # One of an earlier draft model in the same folder is no part of this one.
                (folder / REDUCED_HEAD_FILE).unlink(missing_ok=True)
                if vocabulary is not None:
                    ReducedHead(vocabulary, self._head[vocabulary].bfloat16()).save(folder)
                for name in _TOKENIZER_FILES:
                    if (self._target / name).is_file():
                        shutil.copyfile(self._target / name, folder / name)
            except (OSError, RuntimeError, SafetensorError) as error:
                raise DraftingFailed(
                    f"{folder} can't be written: {error}. What it has learnt is kept: make room, "
                    "then go on with the same command"
                ) from error


def _cut_config(target: Path, num_layers: int) -> Any:
    config = AutoConfig.from_pretrained(str(target), trust_remote_code=False, local_files_only=True)
    config = config.get_text_config()
    num_there = config.num_hidden_layers
    if num_layers >= num_there:
        advice = f"; use {max(1, num_there // 10)} or so" if num_there > 1 else ", as any other"
        raise ConfigError(
            f"the target has {num_there} layers: a draft model of {num_layers} would be no smaller{advice}"
        )
    for name in _LISTED_BY_LAYER:
        value = getattr(config, name, None)
        if isinstance(value, list) and len(value) == num_there:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = num_layers
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = min(config.max_window_layers, num_layers)
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars, and its list of the layers that are left out on purpose."""
    verbosity, has_bars = tell.get_verbosity(), tell.is_progress_bar_enabled()
    tell.set_verbosity_error()
    tell.disable_progress_bar()
    try:
        yield
    finally:
        tell.set_verbosity(verbosity)
        if has_bars:
            tell.enable_progress_bar()
