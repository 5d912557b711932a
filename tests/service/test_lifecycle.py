"""A service's life before its first port has a model behind it; the rest is told end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine import ConfigError
from headrace.service.config import ServiceConfig
from headrace.service.lifecycle import model_from_files


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
