"""The life of the process: bind, load, warm up, serve, drain, leave."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.engine import (
    AsyncEngine,
    FailureEvent,
    LoadedModel,
    LoadProgress,
    Request,
    RequestId,
    SamplingDefaults,
    SamplingParams,
    StopConditions,
    check_machine,
    load_model,
    look_up_model,
    resolve_model,
)
from headrace.service.collector import settled_garbage
from headrace.service.config import ServiceConfig
from headrace.service.control import Drainer
from headrace.service.exit_codes import EXIT_ENGINE_DIED, EXIT_OK
from headrace.service.health import Health
from headrace.service.listening import Listener
from headrace.service.memory import give_back_freed
from headrace.service.metrics import follow_steps
from headrace.service.metrics_server import metrics_port
from headrace.service.progress import ShownProgress
from headrace.service.ready_file import ready_file
from headrace.service.server import (
    Endpoint,
    Entrance,
    make_control_server,
    make_health_server,
    make_public_server,
)
from headrace.service.serving import ServedModel, Serving
from headrace.service.signals import StopSignals
from headrace.service.tasks import begin, end
from headrace.service.telemetry import log, log_loop_fault
from headrace.service.text import TextWorkers

ModelSource = Callable[[ServiceConfig, LoadProgress], LoadedModel]

_FLUSH_S = 1.0
"""Time for last messages to reach their clients."""
_HEARTBEAT_S = 0.5
_WARM_UP_TOKENS = 2


def model_from_files(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
    """Fetch and load what the configuration names."""
    # What can't work is told before anything is fetched.
    check_machine(config.engine_config(Path(config.model)))
    path = resolve_model(config.model, config.cache, progress)
    draft_path = None
    if config.draft_model is not None:
        draft_path = resolve_model(config.draft_model, config.cache, progress)
    return load_model(config.engine_config(path, draft_path), progress)


async def serve(config: ServiceConfig, source: ModelSource | None = None) -> int:
    """Serve until a signal, or the engine's death.

    Args:
        source: loads the model; called in a thread of its own. None: `model_from_files`, where what the
            configuration names is looked up before any port is opened.

    Returns:
        The process's exit code.

    Raises:
        BindError: a port can't be had.
        UnusableFile: a certificate, key or token file can't be taken.
        EngineError: the model can't be served.
    """
    asyncio.get_running_loop().set_exception_handler(log_loop_fault)
    if source is None:
        for spec in (config.model, config.draft_model):
            if spec is not None:
                look_up_model(spec)
        source = model_from_files
    return await _Service(config, await Health.start()).run(source)


class _Service:
    """One process's service, from its first port to its exit code."""

    def __init__(self, config: ServiceConfig, health: Health) -> None:
        self._config = config
        self._health = health
        self._serving = Serving(config.make_edge())
        self._drainer = Drainer(self._serving, health, config.lame_duck_s, config.drain_grace_s)
        self._stop = StopSignals()

    async def run(self, source: ModelSource) -> int:
        """Ports first, then the model, then requests."""
        async with _listening(self._config, self._serving, self._health, self._drainer) as endpoint:
            loading = asyncio.create_task(_in_thread(lambda: _load(self._config, source)))
            try:
                if not await self._is_done_before_a_signal(loading):
                    log.info("stopped while loading")
                    return EXIT_OK
            finally:
                await end(loading)
            model = loading.result()
            if self._config.generation_defaults == "neutral":
                model = replace(model, info=replace(model.info, sampling_defaults=SamplingDefaults()))
            # The engine goes down before the servers do, so that what it ends is still told.
            async with AsyncEngine(model, self._config.engine_config(Path(self._config.model))) as engine:
                return await self._run_engine(engine, endpoint)

    async def _run_engine(self, engine: AsyncEngine, endpoint: Endpoint) -> int:
        warming = asyncio.create_task(_warm_up(engine))
        try:
            if not await self._is_done_before_a_signal(warming):
                return EXIT_OK
        finally:
            await end(warming)
        warming.result()
        limits = self._config.limits()
        texts = TextWorkers(self._config.text_threads, limits)
        name = self._config.served_model_name or engine.info.name
        try:
            self._serving.open(ServedModel(name, engine, texts, limits))
            await self._health.ready()
            _log_ready(self._config, engine, name, endpoint)
            with settled_garbage():
                return await self._until_the_end(engine)
        finally:
            self._serving.close()
            texts.close()

    async def _until_the_end(self, engine: AsyncEngine) -> int:
        dying = begin(engine.died(), "death-watch")
        stall_timeout_s = self._config.stall_timeout_s
        watching = begin(
            self._health.watch(engine, stall_timeout_s, min(_HEARTBEAT_S, stall_timeout_s / 2)),
            "health-watch",
        )
        counting = begin(follow_steps(engine, self._serving.edge.metrics, time.monotonic), "step-counter")
        tidying = begin(give_back_freed(), "freed-memory")
        hurrying = begin(self._stop.second(), "second-signal")
        draining: asyncio.Task[int] | None = None
        try:
            if not await self._is_done_before_a_signal(dying):
                draining = begin(self._drainer.drain(), "drain")
                await asyncio.wait({draining, hurrying, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                log.critical("engine died", reason=str(dying.result()))
                await self._health.dead()
                return EXIT_ENGINE_DIED
            return self._stop.exit_code
        finally:
            await end(dying, watching, counting, tidying, hurrying, draining)

    async def _is_done_before_a_signal(self, task: asyncio.Future[Any]) -> bool:
        stopping = begin(self._stop.first(), "first-signal")
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return task.done()
        finally:
            await end(stopping)


@asynccontextmanager
async def _listening(
    config: ServiceConfig, serving: Serving, health: Health, drainer: Drainer
) -> AsyncIterator[Endpoint]:
    """Both servers, up from here to the end of the block; where callers connect."""
    limits, logs_rpcs = config.limits(), config.access_log
    offers = {"has_reflection": config.reflection, "has_channelz": config.channelz}
    callers = Entrance.guarded(config.caller_rules(), config.caller_tls(), has_access_log=logs_rpcs)
    operator = Entrance.guarded(config.control_rules(), config.control_tls(), has_access_log=logs_rpcs)
    _log_entrances(config)
    listeners = [
        Listener(
            lambda door: make_public_server(
                serving,
                health,
                limits,
                **offers,
                max_connection_age_s=config.max_connection_age_s,
                entrance=callers,
                door=door,
            ),
            Endpoint(config.host, config.port),
            "--port",
            config.drain_grace_s,
            callers.credentials,
        ),
        Listener(
            lambda door: make_control_server(
                serving, health, drainer, limits, **offers, entrance=operator, door=door
            ),
            Endpoint(config.control_host, config.control_port),
            "--control-port",
            config.drain_grace_s,
            operator.credentials,
        ),
    ]
    names = ["port", "control_port"]
    if config.health_port is not None:
        names.append("health_port")
        listeners.append(
            Listener(
                lambda door: make_health_server(health, limits, serving.edge, door=door),
                Endpoint(config.health_host, config.health_port),
                "--health-port",
                config.drain_grace_s,
            )
        )
    watching: list[asyncio.Task[None]] = []
    try:
        for listener in listeners:
            await listener.start()
        watching += [begin(listener.watch(), "port-watch") for listener in listeners]
        ports = {name: listener.endpoint.port for name, listener in zip(names, listeners, strict=True)}
        async with AsyncExitStack() as stack:
            if config.metrics_port is not None:
                scraped = Endpoint(config.metrics_host, config.metrics_port)
                ports["metrics_port"] = await stack.enter_async_context(metrics_port(serving, scraped))
            stack.enter_context(ready_file(config.ready_file, health, ports))
            log.info("listening", host=config.host, **ports, pid=os.getpid())
            yield listeners[0].endpoint
    finally:
        await end(*watching)
        await asyncio.gather(*(listener.stop(_FLUSH_S) for listener in listeners))
        await asyncio.to_thread(serving.edge.tracer.close)
        log.info("stopped")


def _log_entrances(config: ServiceConfig) -> None:
    control = config.control_rules()
    log.info(
        "entrances",
        tls=config.caller_tls() is not None,
        auth=config.caller_rules().is_on,
        control_auth=control.is_on,
    )
    if config.insecure:
        log.warning("insecure: ports may be open to other machines in plain text, or to everybody")
    if control.certificate_roles == frozenset() and not control.needs_token:
        log.warning("nobody may enter the operator's port: give --control-tls-client-ca or --auth-tokens")


def _load(config: ServiceConfig, source: ModelSource) -> LoadedModel:
    began_s = time.monotonic()
    with ShownProgress() as progress:
        model = source(config, progress)
    log.info("model loaded", seconds=round(time.monotonic() - began_s, 2))
    return model


async def _warm_up(engine: AsyncEngine) -> None:
    """Pass one generation through the engine, as a request would.

    Raises:
        EngineError: it failed.
    """
    token_id = engine.info.bos_token_id or 0
    room = engine.layout.longest(engine.info.max_model_len)
    request = Request(
        request_id=RequestId("0:warm-up"),
        prompt_token_ids=(token_id,) * min(16, room - 1),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=min(_WARM_UP_TOKENS, room - min(16, room - 1)), ignore_eos=True),
    )
    began_s = time.monotonic()
    async for event in engine.submit(request):
        if isinstance(event, FailureEvent):
            raise event.error
    # It would stop the event loop when the first constraint comes.
    has_constraints = await engine.constraints.prepare()
    log.info("warmed up", seconds=round(time.monotonic() - began_s, 3), constraints=has_constraints)


def _log_ready(config: ServiceConfig, engine: AsyncEngine, name: str, endpoint: Endpoint) -> None:
    """The line that says where to connect and what is on."""
    info, layout = engine.info, engine.layout
    budget = {"tpot": config.target_tpot_ms, "ttft": config.target_ttft_ms}
    log.info(
        "ready",
        address=endpoint.address,
        model=name,
        family=info.family,
        dtype=info.dtype,
        weight_dtype=info.dtype if config.weight_dtype == "same" else config.weight_dtype,
        max_model_len=info.max_model_len,
        kv_blocks=layout.num_usable_blocks,
        block_size=layout.block_size,
        kv_tokens=layout.num_tokens,
        batching=engine.batching.value,
        max_num_seqs=engine.max_num_seqs,
        speculation=config.speculation_config().kind.value,
        latency_budget=" ".join(f"{what}={ms:g}ms" for what, ms in budget.items() if ms is not None)
        or "none",
        tls=config.caller_tls() is not None,
        auth=config.caller_rules().is_on,
        end_token_ids=sorted(info.eos_token_ids),
    )


async def _in_thread(work: Callable[[], LoadedModel]) -> LoadedModel:
    """Run `work` in a thread that nobody waits for at the end: a load can't be broken off."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LoadedModel] = loop.create_future()

    def settle(result: LoadedModel | None, error: BaseException | None) -> None:
        if future.done():
            return
        if result is not None:
            future.set_result(result)
        else:
            future.set_exception(error or RuntimeError("nothing was loaded"))

    def run() -> None:
        result: LoadedModel | None = None
        fault: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            fault = error
        # The loop may be gone by now: then nobody wants the model.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=run, name="headrace-load", daemon=True).start()
    return await future
