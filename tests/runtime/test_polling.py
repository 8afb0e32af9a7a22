"""Descriptors that wake a poll (:mod:`zmqgrad.runtime.polling`)."""

import copy
import os

import pytest

from zmqgrad.runtime.polling import Wakeup


def test_a_copy_that_failed_closes_no_descriptor() -> None:
    wakeup = Wakeup()
    with pytest.raises(TypeError, match="copied"):
        copy.deepcopy([wakeup])
    os.fstat(wakeup.fd)
    wakeup.set()
