"""What is logged is one printable line, whoever chose the names in it."""

import ast
import importlib
import logging
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from tests.store.through import Through, nothing
from tests.test_architecture import MODULES

HOSTILE = "\x1b[2J\x1b]0;owned\x07a\nERROR all is lost\r\u202egnp.exe"
HANDLED = {"logging.getLogger('uvicorn.access')", "logging.getLogger('pulse_rl')"}  # get a filter or a handler there
LOGGING = sorted(name for name, file in MODULES.items() if "logger(__name__)" in file.read_text())


def test_every_logger_is_made_in_one_place() -> None:
    assert len(LOGGING) > 8
    for name, file in MODULES.items():
        if name != "logs":
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            made = [ast.unparse(call) for call in calls if ast.unparse(call.func).endswith("getLogger")]
            assert set(made) <= HANDLED, name


@pytest.mark.parametrize("name", LOGGING)
def test_nothing_that_is_logged_reaches_a_terminal_as_it_is(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if name.startswith("integrations.vllm."):
        pytest.importorskip("vllm")
    module: Any = importlib.import_module(f"pulse_rl.{name}")
    with caplog.at_level(logging.INFO):
        module.log.warning("%s is damaged: %s", HOSTILE, pulse.StoreError(HOSTILE))
        module.log.info(HOSTILE)
        module.log.info("100 %")
    assert len(caplog.records) == 3
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "\n" not in caplog.handler.format(record)
    assert caplog.records[0].getMessage().startswith("\ufffd[2J\ufffd]0;owned\ufffda ERROR")
    assert caplog.records[2].getMessage() == "100 %"


def test_a_server_s_answer_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def failing(call: str, name: str) -> None:
        if call == "check_create":
            store.before = nothing
            raise pulse.StoreError(f"cannot write: {HOSTILE}", temporary=True)

    store = Through(pulse.open_store("memory://"), before=failing)
    pulse.Publisher(store, patience=30).publish({"w": np.zeros(3, np.uint16)})
    (record,) = caplog.records
    assert record.name == "pulse_rl.store.patient"
    assert "owned" in record.getMessage()
    assert record.getMessage().isprintable()
