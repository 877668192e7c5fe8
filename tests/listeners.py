"""Addresses on which processes accept connections."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening_addresses(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the IP addresses on which any of the processes accepts TCP connections."""
    found = set()
    for process in processes:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return found
