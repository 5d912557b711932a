"""What `headrace serve --help` looks like."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ByteSize

_GROUPS = (
    ("model", r"(model|served_model_name|config|cache|generation_defaults|max_model_len)"),
    ("computing", r"(device|dtype|weight_dtype|attention_backend|cuda_graphs|kv_splits|threads)"),
    ("memory", r"(block_size|num_blocks|kv_memory|gpu_memory_utilization|prefix_caching)"),
    (
        "scheduling",
        r"(batching|async_scheduling|static_batch_\w+|max_num_(seqs|batched_tokens|waiting|skips)|max_prefill_\w+)",
    ),
    ("scheduling", r"(max_waiting_tokens|max_priority|priority_ageing_s|client_weights)"),
    ("latency targets", r"(target|class)_(tpot|ttft)_ms|refuse_late"),
    ("several tokens per step", r"speculation|draft_\w+|\w+_speculative_tokens"),
    ("security", r"(control_)?tls_\w+|auth_\w+|jwt_\w+|insecure"),
    ("bounds of each client", r"max_client_\w+|client_tokens_\w+"),
    ("observability", r"metrics_\w+|access_log|otlp_\w+|trace_\w+|log_\w+|stall_timeout_s|channelz"),
    ("ports", r"(control_|health_)?(host|port)|reflection|ready_file|max_connection_\w+"),
    ("requests and streams", r"max_(message|text)_size|max_request_s|text_threads|slow_reader_s"),
    ("requests and streams", r"max_unread_\w+|paused_\w+|max_num_paused|detach_\w+|max_resumable"),
    ("the end", r"drain_grace_s|lame_duck_s"),
)
"""Under which heading a setting stands in the help: the first whose pattern is its whole name."""
OTHER = "other"


def group_of(name: str) -> str:
    """The heading of a setting; `OTHER` where no pattern fits."""
    return next((title for title, pattern in _GROUPS if re.fullmatch(pattern, name)), OTHER)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says what a value is in a user's words, not in Python's. A subclass sets where models are kept."""

    cache_dir = Path()

    _METAVARS = MappingProxyType(
        {
            "ByteSize": "SIZE",
            "Path": "PATH",
            "dict[str,float]": "NAME=SHARE",
            "dict[int,float]": "PRIORITY=MS",
            "float": "SECONDS",
            "int": "N",
            "str": "TEXT",
        }
    )

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """One line: with so many flags, those of a full one would hide what stands below."""
        super().add_usage("%(prog)s --model MODEL [options]", actions, groups, prefix)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """Settings under headings, in the order of `_GROUPS`; what is no setting, --help, comes first."""
        members: dict[str, list[argparse.Action]] = {title: [] for title, _ in _GROUPS}
        for action in actions:
            if action.dest == "help":
                super().add_arguments([action])
            else:
                members.setdefault(group_of(action.dest), []).append(action)
        for title, group in members.items():
            self.start_section(title)
            super().add_arguments(group)
            self.end_section()

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
        written = super()._metavar_formatter(action, default_metavar)
        words = dict(self._METAVARS)
        if not action.dest.endswith("_s"):
            words["float"] = "MS" if action.dest.endswith("_ms") else "SHARE"
        return lambda size: tuple(words.get(word, word) for word in written(size))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(cleandoc(text), width, indent)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        for unset in ("(default: null)", "(default: )", "(default factory: dict)"):
            text = text.replace(unset, "")
        text = text.replace("default factory: default_cache_dir", f"default: {self.cache_dir}")
        if action.metavar == "ByteSize":
            text = re.sub(r"(?<=default: )\d+", lambda number: ByteSize(number[0]).human_readable(), text)
        return text.rstrip()
