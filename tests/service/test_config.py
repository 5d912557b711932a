from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headrace.engine import AsyncScheduling, BatchingPolicy, ConfigError
from headrace.service.config import (
    InvalidConfig,
    ServiceConfig,
    cache_dir,
    default_cache_dir,
    environment_doubts,
    in_flags,
    leaves_heaps_to_us,
    let_threads_sleep,
    load_config,
    quiet_grpc,
)
from headrace.service.config_help import OTHER, group_of
from headrace.service.limits import Limits

MODEL = ("--model", "m")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServiceConfig.model_fields:
        monkeypatch.delenv(f"HEADRACE_{name.upper()}", raising=False)


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "headrace.yaml"
    path.write_text(text)
    return str(path)


def problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(InvalidConfig) as refusal:
        load_config(argv)
    return refusal.value.problems


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ("--config", yaml_file(tmp_path, "max_num_seqs: 2\nport: 3\nblock_size: 4\n"))
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("HEADRACE_PORT", "6")
    config = load_config((*MODEL, *file, "--max-num-seqs", "7"))
    assert (config.max_num_seqs, config.port, config.block_size, config.control_port) == (7, 6, 4, 50052)


def test_the_file_may_be_named_by_a_variable_and_name_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", yaml_file(tmp_path, "model: from-file\n"))
    assert load_config(()).model == "from-file"
    assert load_config(("--config=" + yaml_file(tmp_path, "model: other\n"),)).model == "other"


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("1024", 1024), ("64MB", 64_000_000), ("64MiB", 64 * 2**20), ("1.5 GiB", 3 * 2**29)],
)
def test_sizes_are_written_as_people_write_them(size: str, num_bytes: int) -> None:
    assert load_config((*MODEL, "--kv-memory", size)).kv_memory == num_bytes


def test_a_switch_can_be_turned_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(MODEL).reflection
    assert not load_config((*MODEL, "--no-reflection")).reflection
    monkeypatch.setenv("HEADRACE_REFLECTION", "false")
    assert not load_config(MODEL).reflection
    assert load_config((*MODEL, "--reflection")).reflection


def test_no_model_says_the_three_ways_to_name_one() -> None:
    (problem,) = problems()
    assert "--model" in problem
    assert "HEADRACE_MODEL" in problem


def test_a_misspelt_flag_is_answered_with_the_nearest() -> None:
    assert problems(*MODEL, "--max-num-seq", "3") == (
        "--max-num-seq is not known: did you mean --max-num-seqs?",
    )


def test_a_misspelt_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "kv_memroy: 1\nmax-num-seqs: 2\nzzz: 3\n")
    assert problems(*MODEL, "--config", path) == (
        f"{path}: key 'kv_memroy' is not known: did you mean kv_memory?",
        f"{path}: key 'max-num-seqs' is not known: did you mean max_num_seqs?",
        f"{path}: key 'zzz' is not known; see headrace serve --help",
    )


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [", "a: \x00"])
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str) -> None:
    (problem,) = problems(*MODEL, "--config", yaml_file(tmp_path, text))
    assert "headrace.yaml" in problem
    assert "\n" not in problem


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    (problem,) = problems(*MODEL, "--config", str(tmp_path / "none.yaml"))
    assert "can't be read" in problem


def test_each_wrong_value_is_one_line_that_names_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_BLOCK_SIZE", "none")
    told = problems(
        *MODEL,
        *("--port", "70000", "--dtype=int4", "--kv-memory", "3 parsecs"),
        *("--config", yaml_file(tmp_path, "drain_grace_s: -1\n")),
    )
    starts = ["--port:", "--dtype:", "HEADRACE_BLOCK_SIZE:", "--kv-memory:", "key drain_grace_s of the file:"]
    assert sorted(line.split(":")[0] + ":" for line in told) == sorted(starts)
    assert any("70000" in line for line in told)
    assert "--kv-memory: input should be a size such as 512MiB or 3GiB, got '3 parsecs'" in told


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_times_are_finite(value: str) -> None:
    (problem,) = problems(*MODEL, f"--drain-grace-s={value}")
    assert problem.startswith("--drain-grace-s")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-message-size", "1"),
        ("--text-threads", "100000"),
        ("--priority-ageing-s", "1e-310"),
        ("--max-priority", "-1"),
        ("--max-waiting-tokens", "1"),
        ("--static-batch-wait-s", "1e9"),
        ("--static-batch-wait-s", "nan"),
    ],
)
def test_a_value_that_no_server_could_work_with_is_refused(flag: str, value: str) -> None:
    with pytest.raises((InvalidConfig, ConfigError)) as refusal:
        load_config((*MODEL, flag, value)).engine_config(Path("m"))
    assert in_flags(str(refusal.value)).startswith(flag)


def test_limits_that_contradict_each_other_are_refused() -> None:
    (problem,) = problems(*MODEL, "--max-num-seqs", "100", "--max-num-batched-tokens", "50")
    assert "--max-num-batched-tokens=50 is below --max-num-seqs=100" in problem
    (problem,) = problems(*MODEL, "--kv-memory", "1GiB", "--num-blocks", "50")
    assert "leave one out" in problem
    (problem,) = problems(*MODEL, "--client-weights", "=1")
    assert problem.startswith("--client-weights: a share is for a client, whose name stands before the =")


def test_a_variable_that_kubernetes_sets_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "tcp://10.0.0.1:50051")
    told = problems(*MODEL)
    assert told[0].startswith("HEADRACE_PORT: ")
    assert "enableServiceLinks: false" in told[1]


def test_a_misspelt_variable_raises_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("HEADRACE_SOMETHING_ELSE", "3")
    monkeypatch.setenv("HEADRACE_TLS_CA", "ca.pem")
    monkeypatch.setenv("HEADRACE_TOKEN", "of a client")
    monkeypatch.setenv("HEADRACE_TARGET", "of a client")
    monkeypatch.setenv("HEADRACE_CONTROL_TARGET", "of a client")
    assert list(environment_doubts()) == [
        "HEADRACE_MAX_NUM_SEQ is not known: did you mean HEADRACE_MAX_NUM_SEQS?"
    ]


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(("--help",))
    text = capsys.readouterr().out
    assert end.value.code == 0
    for name, setting in ServiceConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert setting.description
    assert text.startswith("usage: headrace serve --model MODEL [options]\n\n")
    headings = re.findall(r"^  ([a-z ]+):$", text, flags=re.MULTILINE)
    assert headings[:3] == ["model", "computing", "memory"]
    assert len(headings) == len(set(headings)) >= 10
    places = [
        text.index(f"\n    {flag} ") for flag in ("--model", "--max-num-seqs", "--tls-cert", "--log-level")
    ]
    assert places == sorted(places)
    # A new setting has a place among the others: see `config_help`.
    assert [name for name in ServiceConfig.model_fields if group_of(name) == OTHER] == []
    assert "(default: 50051)" in text
    assert "16.0MiB" in text
    assert "null" not in text


def test_the_engine_is_told_what_was_asked() -> None:
    config = load_config(
        (
            *MODEL,
            *("--served-model-name", "name", "--dtype", "bfloat16", "--max-model-len", "99"),
            *(
                "--block-size",
                "4",
                "--num-blocks",
                "50",
                "--max-num-seqs",
                "3",
                "--max-num-batched-tokens",
                "7",
            ),
            *("--max-prefill-chunk", "5", "--max-num-waiting", "6", "--batching", "static", "--threads", "2"),
        )
    )
    engine = config.engine_config(Path("/models/m"))
    assert (engine.model.path, engine.model.name) == (Path("/models/m"), "name")
    assert (engine.model.dtype, engine.model.max_model_len) == ("bfloat16", 99)
    assert (engine.cache.block_size, engine.cache.num_blocks, engine.num_threads) == (4, 50, 2)
    scheduler = engine.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_prefill_chunk) == (
        3,
        7,
        5,
    )
    assert (scheduler.max_num_waiting, scheduler.batching) == (6, BatchingPolicy.STATIC)


def test_static_batches_wait_as_long_as_is_said_and_continuous_ones_have_nothing_to_wait_for() -> None:
    def wait_s(*argv: str) -> float:
        return load_config((*MODEL, *argv)).engine_config(Path("/m")).scheduler.static_batch_wait_s

    assert wait_s("--batching", "static", "--static-batch-wait-s", "0.5") == 0.5
    assert wait_s("--batching", "static") == 0.05
    with pytest.raises(InvalidConfig, match="for static batching alone"):
        load_config((*MODEL, "--static-batch-wait-s", "0.5"))


def test_steps_are_planned_ahead_where_that_is_asked_for() -> None:
    def wanted(*argv: str) -> AsyncScheduling:
        return load_config((*MODEL, *argv)).engine_config(Path("/m")).scheduler.async_scheduling

    assert wanted() is AsyncScheduling.AUTO
    assert wanted("--async-scheduling", "on") is AsyncScheduling.ON
    assert wanted("--async-scheduling", "off", "--speculation", "prompt_lookup") is AsyncScheduling.OFF
    with pytest.raises(InvalidConfig, match="--async-scheduling=on can't be had with --speculation="):
        wanted("--async-scheduling", "on", "--speculation", "prompt_lookup")


def test_an_operator_caps_priorities() -> None:
    limits = load_config((*MODEL, "--max-priority", "5")).limits()
    assert (limits.min_priority, limits.max_priority) == (-100, 5)
    with pytest.raises(InvalidConfig, match="--max-priority"):
        load_config((*MODEL, "--max-priority", "101"))
    load_config((*MODEL, "--max-priority", "5", "--class-tpot-ms", "5=20"))
    with pytest.raises(InvalidConfig, match="for priority 6, which no request may ask for"):
        load_config((*MODEL, "--max-priority", "5", "--class-tpot-ms", "6=20"))


def test_the_engine_is_told_where_to_compute() -> None:
    flags = ("--device", "cuda", "--attention-backend", "flash", "--gpu-memory-utilization", "0.5")

    settings = load_config((*MODEL, *flags, "--no-cuda-graphs", "--no-kv-splits"))
    engine = settings.engine_config(Path("/models/m"))

    assert (engine.model.device, engine.model.attention_backend) == ("cuda", "flash")
    assert not engine.model.cuda_graphs
    assert not engine.model.kv_splits
    assert engine.cache.gpu_memory_utilization == 0.5
    # What suits the device is known when the model is loaded.
    assert engine.cache.block_size is None


@pytest.mark.parametrize("share", ["0", "1.01", "nan"])
def test_a_share_of_a_gpu_is_within_one(share: str) -> None:
    with pytest.raises(InvalidConfig, match="--gpu-memory-utilization"):
        load_config((*MODEL, "--gpu-memory-utilization", share))


def test_the_defaults_of_flags_and_limits_agree() -> None:
    assert load_config(MODEL).limits() == Limits()


def test_a_model_of_the_hub_is_called_by_its_name_and_not_by_a_hash() -> None:
    def name_of(*argv: str) -> str:
        return load_config(argv).engine_config(Path("/cache/snapshots/0123abc")).model.name

    assert name_of("--model", "hf:org/model") == "org/model"
    assert name_of("--model", "hf:org/model@main") == "org/model"
    assert name_of("--model", "hf:org/model", "--served-model-name", "mine") == "mine"
    assert name_of("--model", "folder") == ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("dtype='x' is not known", "--dtype='x' is not known"),
        ("memory_bytes=1 is too small, num_threads=0 too", "--kv-memory=1 is too small, --threads=0 too"),
        ("a=b and --block-size=3 stay", "a=b and --block-size=3 stay"),
    ],
)
def test_settings_are_told_as_flags(said: str, told: str) -> None:
    assert in_flags(said) == told


@pytest.mark.parametrize(("given", "kept"), [(None, "NONE"), ("debug", "debug")])
def test_grpc_keeps_its_lines_to_itself_unless_asked(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if given is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", given)
    quiet_grpc()
    assert os.environ["GRPC_VERBOSITY"] == kept


def test_models_are_kept_in_the_users_cache_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/headrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(MODEL).cache == Path("/home/someone/.cache/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "/elsewhere")
    assert load_config(MODEL).cache == Path("/elsewhere")
    assert cache_dir() == Path("/elsewhere")


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_sleep_soon_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spin_count: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count


@pytest.mark.parametrize("said", [None, "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_heaps_are_left_to_us_unless_somebody_has_said_how_many(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(said, "1")
    assert leaves_heaps_to_us() == (said is None)
