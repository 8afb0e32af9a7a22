"""A state and its journal: from the one to the other and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from zmqgrad.store.answers import Answers
from zmqgrad.store.effects import Reply
from zmqgrad.store.journal import Journal
from zmqgrad.store.records import Entry, Role
from zmqgrad.store.state import State
from zmqgrad.wire.messages import StoreDone

logger = logging.getLogger(__name__)


def replay(journal: Journal, state: State, answers: Answers) -> None:
    """Bring ``state`` and ``answers``, which are new, to where ``journal`` says they were.

    Raises:
        JournalError: if it is damaged.
    """
    for role, line, number, message in journal.entries():
        if role is Role.CHANGE:
            for effect in state.apply(message, None, 0.0):
                if type(effect) is Reply and line:
                    answers.remember(line, number, effect.message)
        elif role is Role.ANSWER:
            answers.remember(line, number, message)
        else:
            state.revision = number


def compact(journal: Journal, state: State, answers: Answers) -> None:
    """Write ``journal`` anew, with what there is instead of how it came about."""
    try:
        journal.rewrite(_entries(state, answers))
    except OSError as e:
        logger.warning("%r cannot be compacted, and goes on growing: %s", journal, e)


def _entries(state: State, answers: Answers) -> Iterator[Entry]:
    for query in state.as_queries():
        yield Entry(Role.CHANGE, 0, 0, query)
    for line, (number, message) in answers.last.items():
        yield Entry(Role.ANSWER, line, number, message)
    # Last, as the entries above raise it. Watchers compare revisions: it must not go back.
    yield Entry(Role.REVISION, 0, state.revision, StoreDone())
