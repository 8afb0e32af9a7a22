"""Launcher variables: what is read, and what is said of what cannot be."""

from __future__ import annotations

import pytest

from zmqgrad import environment
from zmqgrad.environment import Launch
from zmqgrad.errors import ConfigurationError, RendezvousError


def test_nothing_is_set() -> None:
    assert environment.read_launch({}) == Launch()
    assert not environment.agent_serves_store({})
    assert not environment.allows_insecure({})
    assert not environment.has_secret({})


def test_all_is_set() -> None:
    launch = environment.read_launch(
        {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "RANK": " 3 ", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    )
    assert launch == Launch("host", 29500, 3, 4, 1)
    assert environment.has_secret({"ZMQGRAD_SECRET": "s"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "one", "RANK (the rank of this worker, from 0 to WORLD_SIZE - 1) is 'one'"),
        ("RANK", "-1", "a number of at least 0"),
        ("RANK", "1.0", "'1.0'"),
        ("WORLD_SIZE", "0", "a number of at least 1"),
        ("MASTER_PORT", "65536", "a number from 0 to 65535"),
        ("LOCAL_RANK", "x", "LOCAL_RANK"),
    ],
)
def test_what_is_malformed_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        environment.read_launch({name: value})
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "means"),
    [("1", True), ("True", True), ("yes", True), ("0", False), ("False", False), ("", False), (" ", False)],
)
def test_switches(text: str, means: bool) -> None:
    assert environment.agent_serves_store({"TORCHELASTIC_USE_AGENT_STORE": text}) is means
    assert environment.allows_insecure({"ZMQGRAD_ALLOW_INSECURE": text}) is means


def test_a_switch_between_on_and_off() -> None:
    with pytest.raises(ConfigurationError, match="ZMQGRAD_ALLOW_INSECURE is 'perhaps'; it must be 1 or 0"):
        environment.allows_insecure({"ZMQGRAD_ALLOW_INSECURE": "Perhaps"})


def test_what_is_missing_says_where_it_was_looked_for() -> None:
    assert "not found in the environment: set MASTER_ADDR, or start" in str(
        environment.missing("MASTER_ADDR")
    )
    said = str(environment.missing("RANK", "the argument rank"))
    assert "in the environment and the argument rank: set RANK, give it as the argument rank, or" in said
