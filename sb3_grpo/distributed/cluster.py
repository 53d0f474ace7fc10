"""The connection to a cluster of Ray."""

import logging
import os
import socket
from typing import Any

import ray

#: How long to wait until the address of a cluster answers.
CONNECT_TIMEOUT_S = 5.0


def connect(address: str | None = None) -> None:
    """
    Connect to a cluster, or start one on this machine if there is no address, unless the script has done so. Raise a
    ``ConnectionError`` if the address does not answer.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = dict(log_to_driver=False, logging_level=logging.WARNING)
    if address is None:
        # All connections stay within this machine. Workers share its cores, as the processes of a SubprocVecEnv do.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # "local", because Ray would look for other clusters without an address, and fail where it finds one
        ray.init("local", _node_ip_address="127.0.0.1", include_dashboard=False, **quiet)
        return
    try:
        host, _, port = address.rpartition(":")
        if host and "//" not in address:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConnectionError(
            f"No Ray cluster answers at {address!r} ({error.__cause__ or error}). Start one with `ray start --head`, or leave "
            "`address` out for a cluster on this machine alone."
        ) from error
