"""A service's life before its first port has a model behind it; the rest is told end to end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.engine import ConfigError, ModelLoadError
from headrace.service.config import ServiceConfig
from headrace.service.lifecycle import model_from_files, serve


@pytest.mark.parametrize(
    "asked", [{"dtype": "float16"}, {"attention_backend": "flash"}, {"kv_memory": 2**60}], ids=str
)
def test_what_the_machine_can_not_do_is_told_before_a_model_is_looked_for(
    asked: dict[str, str | int], tmp_path: Path
) -> None:
    config = ServiceConfig.model_validate(
        {"model": str(tmp_path / "nowhere"), "device": "cpu", "cache": tmp_path} | asked
    )
    with pytest.raises(ConfigError):
        model_from_files(config, lambda stage, done, total: None)


@pytest.mark.parametrize("option", ["model", "draft_model"])
async def test_a_model_that_is_nowhere_is_told_before_a_port_is_opened(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # Whoever opened a port would be told of this one.
        port = taken.getsockname()[1]
        named = {"model": str(tmp_path), option: "nosuch"}
        config = ServiceConfig.model_validate({"port": port, "control_port": 0, "cache": tmp_path} | named)
        with pytest.raises(ModelLoadError, match="there is no model 'nosuch': give"):
            await serve(config)
