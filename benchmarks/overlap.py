"""What of the communication is exposed: from the kernels that a GPU ran, as torch's profiler saw them.

Communication is exposed while one of NCCL's kernels runs and no other kernel does. A kernel of NCCL waits for the
other ranks inside, so that the figure holds what ranks wait for each other, too.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same time."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def without(a: list[Span], b: list[Span]) -> list[Span]:
    """Where the first of two lists of disjoint spans in order is, and the second is not."""
    found, j = [], 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > begin:
                found.append((begin, b[k][0]))
            begin = max(begin, b[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found


def seconds(spans: Iterable[Span]) -> float:
    """The length of disjoint spans; they are in microseconds."""
    return sum(end - begin for begin, end in spans) / 1e6


def overlap(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any] | None:
    """Seconds per step, of the events of a Chrome trace over `steps` steps; None: no kernel in it.

    Returns:
        comm_seconds: a kernel of NCCL runs; exposed_comm_seconds: and no other one; exposed_longest: of that the five
        longest spans, [seconds since the first event of all steps, seconds]. compute_idle_seconds: the stream
        with the most work has none; copy_seconds: a copy runs; profiled_step_seconds: from the first to the last.
    """
    by_stream: dict[Any, list[Span]] = defaultdict(list)
    comm: list[Span] = []
    copies: list[Span] = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event["cat"] == "gpu_memcpy":
            copies.append(span)
        elif "nccl" in event["name"].lower():
            comm.append(span)
        else:
            by_stream[event.get("tid")].append(span)
    if not by_stream:
        return None
    streams = {stream: union(spans) for stream, spans in by_stream.items()}
    busiest = max(streams.values(), key=seconds)
    compute = union(span for spans in streams.values() for span in spans)
    comm, everything = union(comm), union([*compute, *comm, *copies])
    began, ended = everything[0][0], everything[-1][1]
    whole = ended - began
    exposed = without(comm, compute)
    longest = sorted(exposed, key=lambda span: span[0] - span[1])[:5]
    return {
        "profiled_step_seconds": whole / 1e6 / steps,
        "comm_seconds": seconds(comm) / steps,
        "exposed_comm_seconds": seconds(exposed) / steps,
        "exposed_longest": [[(a - began) / 1e6, (b - a) / 1e6] for a, b in longest],
        "compute_idle_seconds": (whole / 1e6 - seconds(busiest)) / steps,
        "copy_seconds": seconds(union(copies)) / steps,
    }
