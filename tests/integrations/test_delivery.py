"""What a trainer says and does when engines are away: `EngineDelivery`, with addresses at which nobody listens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pulse_rl.errors import EngineError
from pulse_rl.integrations import delivery
from pulse_rl.integrations.trl import PulseWeightTransfer
from tests.store.servers import free_port


def test_an_engine_that_is_away_is_named_once_with_the_seconds_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "_RETRY_S", 0.01)
    transfer = PulseWeightTransfer(tmp_path, [f"http://127.0.0.1:{free_port()}"], timeout=0.4)
    with caplog.at_level(logging.WARNING, "pulse_rl"), pytest.raises(EngineError, match="out of reach"):
        transfer.init_weight_transfer()
    (message,) = caplog.messages
    assert "out of reach" in message
    assert "sent again" not in message  # nothing was sent yet
    assert message.endswith("it is tried again for up to 0 s")
