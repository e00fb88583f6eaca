"""What a trainer says and does when engines are away: `EngineDelivery`, with addresses at which nobody listens.

Also what a transfer says of a trainer that does not use it; the trainer has what TRL's have.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace as Has

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


def test_a_timeout_that_is_no_number_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    for timeout in ("10m", -1, float("nan")):
        with pytest.raises(ValueError, match="timeout: expected seconds"):
            PulseWeightTransfer(tmp_path, ["http://127.0.0.1:8000"], timeout=timeout)  # type: ignore[arg-type]


def test_a_trainer_that_brings_its_weights_another_way_is_refused(tmp_path: Path) -> None:
    transfer, other = (PulseWeightTransfer(tmp_path, ["http://127.0.0.1:8000"]) for _ in range(2))
    first, second = Has(is_main_process=True), Has(is_main_process=False)
    for trainer in (  # AsyncGRPOTrainer, GRPOTrainer, and one of another rank, which has no way
        Has(accelerator=first, weight_transfer=transfer),
        Has(accelerator=first, vllm_generation=Has(vllm_client=Has(weight_transfer=transfer))),
        Has(accelerator=second, weight_transfer=None),
    ):
        transfer.trainer = trainer
        assert transfer.trainer is trainer
        if trainer.accelerator.is_main_process:
            with pytest.raises(ValueError, match="trainer: expected one that brings its weights by this transfer"):
                other.trainer = trainer
    with pytest.raises(ValueError, match="VLLMClient"):
        transfer.trainer = Has(accelerator=first, vllm_generation=Has(vllm_client=Has()))
