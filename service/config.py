"""The service's configuration: flags, then HEADRACE_* variables, then a YAML file, then defaults.

The one place that reads the environment.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal, Self

import yaml
from pydantic import ByteSize, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from headrace.engine import CacheConfig, ConfigError, EngineConfig, ModelConfig
from headrace.service.config_help import HelpFormatter
from headrace.service.edge_settings import EdgeSettings
from headrace.service.latency_settings import LatencySettings
from headrace.service.limits import Limits
from headrace.service.scheduler_settings import SchedulerSettings
from headrace.service.speculation_settings import SpeculationSettings

_PREFIX = "HEADRACE_"
_ENGINE_NAMES = {"memory_bytes": "kv_memory", "num_threads": "threads"}
"""Settings of the engine that have another name here."""
_VARIABLES_OF_CLIENTS = ("HEADRACE_CONTROL_TARGET", "HEADRACE_TARGET", "HEADRACE_TLS_CA", "HEADRACE_TOKEN")
"""What `headrace health` reads in the same environment, as in a container."""


class InvalidConfig(Exception):
    """The configuration can't be taken.

    Args:
        problems: one readable line each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def default_cache_dir() -> Path:
    """Where fetched models are kept unless told otherwise; a user without a home gets a temporary place."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "headrace"
    try:
        return Path.home() / ".cache" / "headrace"
    except RuntimeError:
        return Path(gettempdir()) / "headrace"


def cache_dir() -> Path:
    """Where fetched models are kept unless a flag says otherwise."""
    return Path(os.environ.get(_variable("cache")) or default_cache_dir())


class ServiceConfig(SchedulerSettings, SpeculationSettings, LatencySettings, EdgeSettings):
    """Serve a language model over gRPC.

    Each setting has three spellings: the flag --max-num-seqs, the variable HEADRACE_MAX_NUM_SEQS and, in the
    YAML file named by --config, the key max_num_seqs. A flag wins over a variable, a variable over the file.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        cli_prog_name="headrace serve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        # A field called `model` is what this is about.
        protected_namespaces=(),
        frozen=True,
    )

    model: str = Field(
        min_length=1,
        description="what to serve: a model folder, a .gguf file, hf:org/name, or a known name such as "
        "smollm2-135m-instruct",
    )
    served_model_name: str = Field("", description="what clients call it; empty takes the model's own name")
    config: Path | None = Field(None, description="YAML file with settings")
    cache: Path = Field(default_factory=default_cache_dir, description="folder for fetched models")

    ready_file: Path | None = Field(
        None,
        description="file that is there while requests are welcome: ports and process id, as JSON; removed "
        "when the server drains",
    )
    reflection: bool = Field(True, description="whether gRPC reflection is offered")
    channelz: bool = Field(
        False,
        description="whether the operator's port tells of gRPC's connections and their counts "
        "(grpc.channelz.v1)",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute and KV type"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute; auto is the CPU for now: a GPU has to be asked for"
    )
    weight_dtype: Literal["same", "int8", "int4"] = Field(
        "same",
        description="how the weights of linear layers are kept: as --dtype, or in 8 or 4 bits with a scale "
        "for every 32 (CPU only: faster and smaller, the output changes a little)",
    )
    attention_backend: str = Field(
        "auto", description="auto picks for the device: native, cpu; flash, torch_varlen; reference"
    )
    cuda_graphs: bool = Field(True, description="whether decode steps on a GPU are captured and replayed")
    kv_splits: bool = Field(
        True,
        description="whether attention on a GPU may cut a text into parts that are computed at once: faster "
        "for few long texts; the last bits then depend on what shares the step",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest sequence, prompt and output, tokens; unset: the model's own limit"
    )
    generation_defaults: Literal["model", "neutral"] = Field(
        "model",
        description="what a sampling control means that a request leaves open: what the model's "
        "generation_config.json says, or nothing",
    )
    threads: int | None = Field(None, ge=1, description="compute threads; unset: one per usable core")

    block_size: int | None = Field(
        None, ge=1, description="tokens per KV block; unset: 4 on a CPU, 256 on a GPU"
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="share of a GPU's memory that the server may take, weights and all",
    )
    kv_memory: ByteSize | None = Field(
        None, gt=0, description="memory for the KV pool, such as 2GiB; unset: a share of what is free"
    )
    num_blocks: int | None = Field(None, ge=1, description="blocks of the KV pool, instead of --kv-memory")
    prefix_caching: bool = Field(
        True, description="whether requests that begin alike share the KV of their full blocks"
    )

    text_threads: int = Field(2, ge=1, le=256, description="threads that encode and decode text")

    drain_grace_s: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="longest wait for running requests at the end, seconds"
    )
    lame_duck_s: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="pause between not ready and refusing new requests, seconds",
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="longest time for one step before health tells, seconds"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        description="log lines on stderr: console for people, json for programs; auto looks for a terminal",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables before init arguments, which are the YAML file's; flags are put before both."""
        return env_settings, init_settings

    @model_validator(mode="after")
    def _suits_the_engine(self) -> Self:
        if self.kv_memory is not None and self.num_blocks is not None:
            raise ValueError("--kv-memory and --num-blocks are both given: they say the same, leave one out")
        self.check_classes(self.max_priority)
        try:
            self.engine_config(Path(self.model))
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def engine_config(self, path: Path, draft_path: Path | None = None) -> EngineConfig:
        """What the engine is told.

        Args:
            path, draft_path: where the files of the model and of its draft model are.
        """
        return EngineConfig(
            model=ModelConfig(
                path=path,
                name=self.served_model_name or self.hub_name,
                dtype=self.dtype,
                weight_dtype=self.weight_dtype,
                max_model_len=self.max_model_len,
                attention_backend=self.attention_backend,
                device=self.device,
                cuda_graphs=self.cuda_graphs,
                kv_splits=self.kv_splits,
            ),
            cache=CacheConfig(
                self.block_size,
                self.num_blocks,
                self.kv_memory,
                self.prefix_caching,
                self.gpu_memory_utilization,
            ),
            scheduler=self.scheduler_config(),
            num_threads=self.threads,
            latency=self.latency_config(),
            speculation=self.speculation_config(draft_path),
        )

    @property
    def hub_name(self) -> str:
        """The organisation and name of a model of the hub, whose folder is called by a hash; else empty."""
        is_of_hub = self.model.startswith("hf:")
        return self.model.removeprefix("hf:").partition("@")[0] if is_of_hub else ""

    def limits(self) -> Limits:
        """What requests are held to."""
        return replace(self.stream_limits(), max_priority=self.max_priority)


def load_config(argv: Sequence[str]) -> ServiceConfig:
    """The configuration that flags, environment and file make together.

    Args:
        argv: flags, without the program's name.

    Raises:
        InvalidConfig: one line for each thing that is wrong.
        SystemExit: --help was asked for, and given.
    """

    class _Help(HelpFormatter):
        cache_dir = cache_dir()

    values = _read_yaml(_config_path(argv))
    try:
        flags = CliSettingsSource[argparse.ArgumentParser](ServiceConfig, formatter_class=_Help)
        return CliApp.run(ServiceConfig, cli_args=list(argv), cli_settings_source=flags, **values)
    except SettingsError as error:
        raise InvalidConfig(_flag_problem(str(error))) from error
    except ValidationError as error:
        raise InvalidConfig(*_problems(error, argv, values)) from error


def let_threads_sleep() -> None:
    """Tell OpenMP, before anything loads it, that a thread that waits for another soon stops spinning.

    Alone on its cores a step takes as long either way; where others use them too, spinning makes it many
    times as long. Who has said how threads wait is left alone.
    """
    if os.environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def quiet_grpc() -> None:
    """Tell gRPC's core, before anything loads it, to keep its own lines to itself: they are no log lines of
    ours, and what they tell of is told by whoever meets it. Who has set how much it says is left alone.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def leaves_heaps_to_us() -> bool:
    """Whether nobody has told the C library how many heaps a process's threads have."""
    return os.environ.keys().isdisjoint(("GLIBC_TUNABLES", "MALLOC_ARENA_MAX"))


def in_flags(message: str) -> str:
    """What the engine says of its settings, ``max_num_seqs=8``, in the words of the command line."""

    def flag(found: re.Match[str]) -> str:
        name = _ENGINE_NAMES.get(found[1], found[1])
        return f"{_flag(name)}=" if name in ServiceConfig.model_fields else found[0]

    return re.sub(r"(?<![\w-])([a-z]+(?:_[a-z]+)*)=", flag, message)


def environment_doubts() -> Iterator[str]:
    """Name variables that look like ours and mean nothing: a misspelt one would be ignored silently."""
    known = [*_VARIABLES_OF_CLIENTS, *(_variable(name) for name in ServiceConfig.model_fields)]
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in known:
            nearest = get_close_matches(name, known, 1, cutoff=0.85)
            if nearest:
                yield f"{name} is not known: did you mean {nearest[0]}?"


def _config_path(argv: Sequence[str]) -> Path | None:
    for position, argument in enumerate(argv):
        if argument == "--config" and position + 1 < len(argv):
            return Path(argv[position + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    named = os.environ.get(_variable("config"))
    return Path(named) if named else None


def _read_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"{path}: can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: is no YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path}: must hold keys and values, such as 'port: 50051'")
    known = [name for name in ServiceConfig.model_fields if name != "config"]
    problems = []
    for key in values:
        if key not in known:
            nearest = get_close_matches(str(key).replace("-", "_"), known, 1, cutoff=0.5)
            hint = f": did you mean {nearest[0]}?" if nearest else "; see headrace serve --help"
            problems.append(f"{path}: key {key!r} is not known{hint}")
    if problems:
        raise InvalidConfig(*problems)
    return values


def _problems(error: ValidationError, argv: Sequence[str], file: Mapping[str, object]) -> Iterator[str]:
    for fault in error.errors():
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"].startswith("byte_size"):
            message = "input should be a size such as 512MiB or 3GiB"
        if not fault["loc"]:
            yield in_flags(message)
            continue
        name = str(fault["loc"][0])
        if fault["type"] == "missing":
            yield f"{_flag(name)} is required (or {_variable(name)}, or the key {name} in --config's file)"
            continue
        given = os.environ.get(_variable(name), "")
        source = _source_of(name, argv, file)
        yield f"{source}: {message[0].lower()}{message[1:]}, got {fault['input']!r}"
        if source == _variable(name) and re.match(r"\w+://", given):
            yield (
                f"{source} looks like what Kubernetes sets for a Service named headrace: "
                "set enableServiceLinks: false in the pod, or rename the Service"
            )


def _source_of(name: str, argv: Sequence[str], file: Mapping[str, object]) -> str:
    flag = _flag(name)
    if any(argument == flag or argument.startswith(f"{flag}=") for argument in argv):
        return flag
    if _variable(name) in os.environ:
        return _variable(name)
    return f"key {name} of the file" if name in file else flag


def _flag_problem(message: str) -> str:
    """argparse's complaint, with the nearest flag where one is misspelt."""
    problem = message.removeprefix("error parsing CLI: ")
    if unpaired := re.match(r"Parsing error encountered for (\w+): ", problem):
        return f"{_flag(unpaired[1])}: each value must be of the form NAME=VALUE"
    misspelt = re.match(r"unrecognized arguments: (--[^\s=]+)", problem)
    if misspelt is None:
        return problem
    known = [_flag(name) for name in ServiceConfig.model_fields]
    nearest = get_close_matches(misspelt[1], known, 1, cutoff=0.5)
    hint = f": did you mean {nearest[0]}?" if nearest else "; see headrace serve --help"
    return f"{misspelt[1]} is not known{hint}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"
