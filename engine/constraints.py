"""Constraints made ready off the event loop, one after the other, before their requests are queued."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from headrace.engine.errors import Overloaded
from headrace.engine.runner.protocol import LoadedModel
from headrace.engine.sampling.constraint import (
    INSTALL_HINT,
    CompiledConstraint,
    Constraint,
    ConstraintCompiler,
)

_MAX_PENDING = 64
_RETRY_AFTER_S = 1.0


class ConstraintDesk:
    """Where requests with constraints come by first.

    Args:
        model: what the constraints are for.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._compiler: ConstraintCompiler | None = None
        self._num_pending = 0
        self._is_closed = False
        # One thread: what is compiled twice at once would be compiled twice.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-constraint")

    async def prepare(self) -> bool:
        """Do beforehand what the first constraint would stop the loop for: the library's own form of the
        vocabulary takes a tenth of a second for 50,000 tokens, and seconds for 250,000.

        Returns:
            Whether this server can follow constraints at all.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._prepare)

    async def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Make the form of a text ready for `Request.constraint`: off the event loop, in bounded time.

        Raises:
            InvalidRequest: it is faulty, not supported, or takes too much; or this server can't follow any.
            Overloaded: too many wait for the same.
            RequestFailed: the compiler was ended from outside; the next call starts another.
        """
        compiled = None if self._compiler is None else self._compiler.cached(constraint)
        if compiled is not None:
            return compiled
        if self._num_pending >= _MAX_PENDING:
            message = (
                f"{self._num_pending} constraints are waiting to be compiled, this server lets no more wait"
            )
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._compile, constraint)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Break off what is being compiled; nothing is compiled any more."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        if not self._prepare() or self._compiler is None:
            raise constraint.refused(f"is not installed on this server, which needs: {INSTALL_HINT}")
        return self._compiler.compile(constraint)

    def _prepare(self) -> bool:
        """Make the compiler, if it isn't there; whether it can be made."""
        if self._compiler is None:
            try:
                # Not everybody who serves a model has it.
                from headrace.engine.sampling.constraint_compiler import GrammarCompiler  # noqa: PLC0415
            except ModuleNotFoundError as error:
                if error.name != "llguidance":
                    raise
                return False
            info = self._model.info
            self._compiler = GrammarCompiler(self._model.tokenizer, info.vocab_size, info.eos_token_ids)
            if self._is_closed:
                self._compiler.close()
        return True
