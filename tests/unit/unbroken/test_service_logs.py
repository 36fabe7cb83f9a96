"""How loud agent and rendezvous are."""

import pytest

from unbroken.logs import read_level
from unbroken_core.vocabulary.errors import InputError


def test_level_of_the_log_is_info_or_what_the_environment_names_in_any_case() -> None:
    found = [read_level(environment) for environment in ({}, {"UNBROKEN_LOG_LEVEL": "debug"})]
    assert found == ["INFO", "DEBUG"]
    with pytest.raises(InputError, match="UNBROKEN_LOG_LEVEL: want one of DEBUG, INFO, WARNING, ERROR, got 'LOUD'"):
        read_level({"UNBROKEN_LOG_LEVEL": "loud"})
