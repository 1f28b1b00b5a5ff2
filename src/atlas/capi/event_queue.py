"""Events on their way to C, and the descriptor that tells of them."""

from __future__ import annotations

import os
import threading
from collections import deque

from atlas.capi.events import News


class EventQueue:
    """A queue whose file descriptor is readable while it is not empty."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news: deque[News] = deque()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, news: News) -> None:
        """Append; wakes whoever waits. Never waits itself."""
        with self._changed:
            self._news.append(news)
            if len(self._news) == 1 and self.fd >= 0:
                os.eventfd_write(self.fd, 1)
            self._changed.notify()

    def take(self) -> News | None:
        """The oldest, or None."""
        with self._changed:
            if not self._news:
                return None
            news = self._news.popleft()
            if not self._news and self.fd >= 0:
                os.eventfd_read(self.fd)
            return news

    def wait(self, timeout_s: float) -> None:
        """Return when there is something, or after a while."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Give the descriptor back; events stay."""
        with self._changed:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1
            self._changed.notify_all()
