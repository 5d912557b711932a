"""The compiled kernels for the tests, in every variant that this processor runs.

Without a built library the tests are skipped and say so; HEADRACE_REQUIRE_NATIVE=1 makes that a failure, so
that a build step that went missing is noticed.
"""

from __future__ import annotations

import os

import pytest

from headrace.engine.native.library import NativeLibrary, NativeUnavailable, find_library

# Read before the fixture that hides HEADRACE_* from each test.
_IS_REQUIRED = os.environ.get("HEADRACE_REQUIRE_NATIVE") == "1"

VARIANTS = ("avx512bf16", "avx512", "avx2", "generic")


def load_library(variant: str | None) -> NativeLibrary:
    """The library with one variant; skips the test where there is none."""
    try:
        path = find_library()
    except NativeUnavailable as error:
        if _IS_REQUIRED:
            raise
        pytest.skip(str(error))
    try:
        return NativeLibrary(path, variant)
    except NativeUnavailable as error:
        # A library that is there and can't be loaded is a fault; a variant that the processor lacks is none.
        if variant is None:
            raise
        pytest.skip(str(error))


@pytest.fixture
def library() -> NativeLibrary:
    """With the variant that a server would use."""
    return load_library(None)


@pytest.fixture(params=VARIANTS)
def any_library(request: pytest.FixtureRequest) -> NativeLibrary:
    """Each variant in turn."""
    return load_library(request.param)
