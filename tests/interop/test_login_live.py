"""A broker that wants a password over TLS, and clients that it does not let in: each is told what to correct."""

from __future__ import annotations

from pathlib import Path

import pytest
from kafka_broker import Broker
from secure_listener import PASSWORD, USER

from tidegate.cli.main import run as command_line
from tidegate.errors import AuthenticationError, UnavailableError
from tidegate.log.kafka.reader import KafkaReader
from tidegate.log.log import open_log

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.log.kafka.log.TIMEOUT_SECONDS", 5)
    monkeypatch.setattr("tidegate.log.kafka.log.TIMEOUT_SECONDS", 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sasl.password": f"not {PASSWORD}"}, [f"'{USER}'", "sasl.mechanism=PLAIN", "sasl.password"]),
        ({"sasl.username": "nobody"}, ["'nobody'", "sasl.username"]),
        ({"sasl.mechanism": "SCRAM-SHA-256"}, ["sasl.mechanism=SCRAM-SHA-256"]),
        ({"ssl.ca.location": "probe"}, ["SASL_SSL", "ssl.ca.location"]),
    ],
    ids=["password", "user", "mechanism", "certificate"],
)
def test_who_is_not_let_in_is_told_which_setting_is_wrong(
    broker: Broker, change: dict[str, str], said: list[str]
) -> None:
    client = {**broker.secure.client(), **change}
    with open_log(f"kafka://{broker.secure.address}", client=client) as log:
        for _ in range(2):  # also where the client waits before it tries again
            with pytest.raises(AuthenticationError) as refused:
                log.topics()
            for each in said:
                assert each in str(refused.value)
            assert PASSWORD not in str(refused.value) and refused.value.exit_code == 2


def test_a_reader_of_its_own_is_told_too(broker: Broker) -> None:
    client = {
        **broker.secure.client(f"not {PASSWORD}"),
        "bootstrap.servers": broker.secure.address,
        "log_level": 0,
    }
    with pytest.raises(AuthenticationError, match="does not let in user 'tidegate'"):
        KafkaReader(broker.secure.address, client, "t", [0])


def test_the_command_line_ends_as_with_any_wrong_setting(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "client.properties"
    settings.write_text(
        "".join(f"{key}={value}\n" for key, value in broker.secure.client(f"not {PASSWORD}").items())
    )
    asked = ["topic", "list", "--log", f"kafka://{broker.secure.address}", "--command-config", str(settings)]
    assert command_line(asked) == 2
    told = capsys.readouterr().err
    assert (
        "does not let in user 'tidegate'" in told
        and "SASL_AUTHENTICATION_FAILED" in told
        and PASSWORD not in told
    )


def test_nobody_there_is_still_out_of_reach(broker: Broker) -> None:
    client = {**broker.secure.client(), "bootstrap.servers": "127.0.0.1:1"}
    with open_log("kafka://127.0.0.1:1", client=client) as log, pytest.raises(UnavailableError):
        log.topics()
