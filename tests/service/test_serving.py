from __future__ import annotations

import grpc
import pytest

from headrace.engine import AsyncEngine
from headrace.service.limits import Limits
from headrace.service.serving import ServedModel, Serving
from headrace.service.status import RpcFailure
from headrace.service.text import TextWorkers
from tests.support.fake_runner import make_fake_model
from tests.support.requests import make_config


def served() -> ServedModel:
    return ServedModel(
        "name", AsyncEngine(make_fake_model(), make_config()), TextWorkers(1, Limits()), Limits()
    )


async def test_before_and_after_there_is_nothing_to_reach() -> None:
    serving, model = Serving(), served()
    with pytest.raises(RpcFailure) as loading:
        serving.model()
    serving.open(model)
    assert serving.model() is model
    serving.close()
    with pytest.raises(RpcFailure) as closed:
        serving.model()
    assert loading.value.code is closed.value.code is grpc.StatusCode.UNAVAILABLE
    assert (loading.value.reason, closed.value.reason) == ("LOADING", "SHUTTING_DOWN")
    assert loading.value.retry_after_s is not None


async def test_only_who_listens_hears_of_the_end() -> None:
    serving, heard = Serving(), []
    with serving.on_close(lambda: heard.append("left before")):
        pass
    with serving.on_close(lambda: heard.append("still here")):
        serving.close()
    assert heard == ["still here"]
    assert serving.is_closed


async def test_a_model_answers_to_its_name_and_to_none() -> None:
    model = served()
    model.require("")
    model.require("name")
    with pytest.raises(RpcFailure, match="'other' is not served here: use 'name'"):
        model.require("other")
