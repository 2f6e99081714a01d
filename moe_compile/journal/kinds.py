"""What a reason says of its candidate.

Contract
    `strict` and reports go by the kind alone.
"""

from __future__ import annotations

import enum


class Kind(enum.Enum):
    """What a reason says of its candidate."""

    NOT_MEANT = "it is not what the rewrite is for"
    NOT_ASKED = "the options leave it off"
    DONE = "it is as wanted"
    NO_GAIN = "it would not pay"
    NOT_POSSIBLE = "it cannot be done in the number or form asked for"
    UNPROVEN = "the rewrite applies here, but is not proven to be safe"
