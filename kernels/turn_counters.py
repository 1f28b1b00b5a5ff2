"""Where kernels count their ``turns``; needs no compiler and no GPU."""

from __future__ import annotations

COUNTER_BYTES = 128
"""From one counter to the next: a cache line, lest those who count at one slow down who waits at
another."""
FULL_ROUND = 1 << 16
"""What a launch adds to its counter; thread blocks of a grid are fewer."""
ARGUMENTS = (("before", "ptr"), ("own", "ptr"))
"""The last arguments of a kernel that takes turns."""
