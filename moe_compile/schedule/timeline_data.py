"""Timelines of a graph as plain data, and as text in a report.

Contract
    A timeline is JSON data, made by `schedule/timeline.py`:
        nodes     of each node that is named below: [name, operator, the user's line, kind]
        launches  collectives, in the order in which they launch: the row of the node, its stream,
                  its result's bytes, the region it is of ("" for none), its verdict
        runs      name of an order -> step_us, exposed_us, peak_bytes;
                  spans: [row of the node, stream, start, length], microseconds;
                  memory: [time, live bytes, row of the node], one where they change;
                  waits: [row of the launch, how long compute stands at the wait, microseconds]
        uncapped_us  time of the fastest order, where memory forbids it
    Imports no torch.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, Final

AS_WRITTEN: Final = "as written"
BEFORE: Final = "before"
AFTER: Final = "after"
"""Names of orders: of the program without any pass; of the rewritten graph as it came to the
scheduler; of the same graph as it runs."""
ON_HOST: Final = "host"
ON_COMPUTE: Final = "compute"
"""Names of streams; all others are links."""
PRODUCT: Final = "product"
OTHER: Final = "other compute"
ON_LINK: Final = "collective"
KINDS: Final = (PRODUCT, OTHER, ON_LINK, ON_HOST)
"""Kinds of spans: of a node, or the host's part of it."""


def packed(data: Any) -> str:
    """Return JSON data as text of letters and digits, compressed."""
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> Any:
    """Return the data of a `packed` text."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
