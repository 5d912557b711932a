from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine import LatencyConfig, LatencyTargets
from headrace.service.config import InvalidConfig, ServiceConfig, load_config


def load(*flags: str) -> ServiceConfig:
    return load_config(["--model", "m", *flags])


def test_without_a_target_nothing_is_promised() -> None:
    assert load().engine_config(Path()).latency == LatencyConfig()


def test_flags_say_targets_for_all_and_for_priorities() -> None:
    config = load(
        *("--target-tpot-ms", "50", "--target-ttft-ms", "500"),
        *("--class-tpot-ms", "5=20", "--class-tpot-ms=-3=200", "--class-ttft-ms", "7=125", "--refuse-late"),
    )
    assert config.engine_config(Path()).latency == LatencyConfig(
        LatencyTargets(0.05, 0.5),
        {
            -3: LatencyTargets(0.2, 0.5),
            5: LatencyTargets(0.02, 0.5),
            7: LatencyTargets(0.05, 0.125),
        },
        refuses_late=True,
    )


def test_the_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text("target_ttft_ms: 500\nclass_tpot_ms: {5: 20, -3: 200}\n")
    latency = load("--config", str(file)).latency_config()
    assert latency.default == LatencyTargets(None, 0.5)
    assert latency.by_priority == {-3: LatencyTargets(0.2, 0.5), 5: LatencyTargets(0.02, 0.5)}


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "1e12", "soon"])
@pytest.mark.parametrize("flag", ["--target-tpot-ms", "--target-ttft-ms"])
def test_what_cannot_be_promised_is_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=flag):
        load(f"{flag}={value}")


@pytest.mark.parametrize("pair", ["5=0", "101=20", "high=20", "5"])
def test_a_class_that_cannot_be_is_refused(pair: str) -> None:
    with pytest.raises(InvalidConfig, match="class-tpot-ms"):
        load(f"--class-tpot-ms={pair}")
