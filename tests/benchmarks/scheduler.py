"""What planning a step and taking in its outcome cost, without a model.

    .venv/bin/python -m tests.benchmarks.scheduler --rows 64,256,1024 --blocks 100000

All sequences decode, none ends: the usual step of a busy server. `plan` is `EngineCore.begin_step`;
`update` is `EngineCore.finish_step`, which counts, shares blocks, appends tokens, checks for ends and makes
the events that callers get, without text; `text` is what the text of those takes on top of that. Times are of
one step, the mean over all steps, of this thread alone, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headrace.engine.config import EngineConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.runner.protocol import LoadedModel
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from headrace.engine.sequence import OutputParams
from headrace.service.collector import settled_garbage
from tests.benchmarks.options import numbers
from tests.support.fake_runner import make_fake_model
from tests.support.requests import make_config, make_request


def main() -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=numbers, default=[64, 256, 1024], help="running sequences, several joined by commas"
    )
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--prompt-len", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed")
    parser.add_argument("--waiting", type=int, default=0, help="further sequences that wait for a place")
    args = parser.parse_args()
    print(f"{'rows':>6} {'plan':>9} {'update':>9} {'together':>9} {'per row':>8} {'text':>9}")
    for num_rows in args.rows:
        plan_us, update_us = _time(num_rows, args, wants_text=False)
        text_us = max(0.0, _time(num_rows, args, wants_text=True)[1] - update_us)
        total_us = plan_us + update_us
        print(
            f"{num_rows:6} {plan_us:9.0f} {update_us:9.0f} {total_us:9.0f} {total_us / num_rows:8.2f} "
            f"{text_us:9.0f}"
        )


def _time(num_rows: int, args: argparse.Namespace, *, wants_text: bool) -> tuple[float, float]:
    """(plan, update), microseconds of the mean step."""
    num_waiting, max_tokens = args.waiting, args.steps + 2 * args.prompt_len
    model = make_fake_model(
        num_blocks=args.blocks, block_size=args.block_size, max_model_len=args.prompt_len + max_tokens + 1
    )
    core = _filled_core(model, num_rows, num_waiting, args.prompt_len, max_tokens, wants_text=wants_text)
    result = RowResult((97,))
    while True:
        plan = core.begin_step()
        assert plan is not None
        core.finish_step(_outcome(plan, result))
        if plan.num_tokens == len(plan.rows) == num_rows:
            break
    with settled_garbage():
        return _time_steps(core, num_rows, args.steps)


def _time_steps(core: EngineCore, num_rows: int, num_steps: int) -> tuple[float, float]:
    result = RowResult((97,))
    plans, updates = [], []
    for _ in range(num_steps):
        began_s = time.thread_time()
        plan = core.begin_step()
        planned_s = time.thread_time()
        assert plan is not None
        assert plan.num_tokens == num_rows
        outcome = _outcome(plan, result)
        executed_s = time.thread_time()
        core.finish_step(outcome)
        updates.append(time.thread_time() - executed_s)
        plans.append(planned_s - began_s)
    return 1e6 * statistics.fmean(plans), 1e6 * statistics.fmean(updates)


def _filled_core(
    model: LoadedModel, num_rows: int, num_waiting: int, prompt_len: int, max_tokens: int, *, wants_text: bool
) -> EngineCore:
    config = EngineConfig(
        model=make_config().model,
        scheduler=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(8192, num_rows),
            max_num_waiting=num_rows + num_waiting,
            max_waiting_tokens=2**40,
        ),
    )
    core = EngineCore(model.info, model.layout, model.tokenizer, config, time.monotonic)
    output = OutputParams(wants_text=wants_text)
    for number in range(num_rows + num_waiting):
        core.add(
            make_request(
                prompt=tuple((number * 31 + i) % 256 for i in range(prompt_len)),
                max_tokens=max_tokens,
                output=output,
            )
        )
    return core


def _outcome(plan: StepPlan, result: RowResult) -> StepResult:
    return StepResult(tuple(result if row.is_sampled else RowResult() for row in plan.rows))


if __name__ == "__main__":
    main()
