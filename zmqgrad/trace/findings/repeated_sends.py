"""Large tensors that a worker sent again and again with the same contents. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from zmqgrad.trace.findings.finding import Finding, Severity, most_common
from zmqgrad.trace.labels import show_time, size, worker_label
from zmqgrad.trace.model import Actor, Call

REPEATS, REPEATED_BYTES = 4, 64 << 20
"""Contents that a worker sends so many times more than to each of its peers once, and so many bytes of it."""

_Contents = tuple[int, int, int, int]


class _Sent:
    """What one worker sent as arguments, or results, of one function."""

    def __init__(self, first: Call) -> None:
        self.first = first
        self.counts: Counter[tuple[str, _Contents]] = Counter()  # by receiver
        self.nanoseconds = 0


class RepeatedSends:
    """The contents that were sent, by sender, function, and whether they were a result."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Actor, str, bool], _Sent] = {}

    def add(self, call: Call) -> None:
        """Adds ``call``."""
        request = call.request
        ends = request.source, request.target
        for i, (is_result, contents) in enumerate(call.contents):
            sender, receiver = ends[is_result], ends[not is_result]
            if sender is not None:
                key = sender, call.function or request.type, is_result
                sent = self._sent.setdefault(key, _Sent(call))
                sent.counts[worker_label(receiver, request.peer), contents] += 1
                sent.nanoseconds += 0 if i else call.sending

    def findings(self) -> Iterator[Finding]:
        """What was sent again and again; most bytes first."""
        found = []
        for (sender, function, is_result), sent in self._sent.items():
            by_contents: defaultdict[_Contents, list[int]] = defaultdict(list)
            for (_, contents), count in sent.counts.items():
                by_contents[contents].append(count)
            repeated = {c: sum(n) for c, n in by_contents.items() if sum(n) - len(n) >= REPEATS}
            wasted = sum((count - len(by_contents[c])) * c[-1] for c, count in repeated.items())
            if wasted >= REPEATED_BYTES:
                found.append((wasted, sender, function, is_result, sent, repeated))
        for wasted, sender, function, is_result, sent, repeated in sorted(found, key=lambda each: -each[0]):
            count, total = max(repeated.values()), sum(contents[-1] for contents in repeated)
            peers = Counter({peer: n for (peer, c), n in sent.counts.items() if c in repeated})
            yield Finding(
                "repeated send",
                Severity.WARNING,
                f"{sender.name} sent the same {size(total)} {count} times, as "
                f"{'the result' if is_result else 'arguments'} of {function}",
                f"To {most_common(peers)}. {size(wasted)} of it were there already; all of it took "
                f"{show_time(sent.nanoseconds)} to serialize and copy. Publish it (rpc.publish), or keep it "
                "where it is needed and pass a reference (rpc.remote). "
                "Changes through numpy or .data are not seen.",
                (sender.name, *peers),
                sent.first.request.sent,
                {"function": function, "bytes": total, "times": count, "repeated_bytes": wasted},
                sent.first.request.key,
            )
