"""Processes of gloo groups that run what tests ask for, started once a file.

Their server has imported everything already, so that a rank starts in no time.
"""

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

PATIENCE = 600  # seconds


class Ranks:
    """Processes 0, 1.. and a group of the first n of them for every size n."""

    def __init__(self, sizes: tuple[int, ...], folder: Path, preload: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        self.pipes, self.processes = [], []
        # The server looks only there for what it imports.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            for rank in range(max(sizes)):
                ours, theirs = context.Pipe()
                place = theirs, rank, sizes, f"file://{folder / 'store'}"
                process = context.Process(target=_serve, args=place, daemon=True)
                process.start()
                self.pipes.append(ours)
                self.processes.append(process)

    def run(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What work(group, *args) returns on every rank of a group; raises what one raised."""
        pipes, call = self.pipes[:size], pickle.dumps((size, work, args))
        for pipe in pipes:
            pipe.send_bytes(call)
        found: dict[Any, Any] = {}
        failed: list[Exception] = []
        patience = PATIENCE
        while ready := wait([pipe for pipe in pipes if pipe not in found], patience):
            found |= {pipe: pickle.loads(pipe.recv_bytes()) for pipe in pipes if pipe in ready}
            if failed := [x for x in found.values() if isinstance(x, Exception)]:
                patience = 1  # who has not failed may wait for who has
            if len(found) == size:
                break
        if failed:
            raise failed[0]
        assert len(found) == size, f"{size - len(found)} ranks say nothing"
        return [found[pipe] for pipe in pipes]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()


def _serve(pipe: Any, rank: int, sizes: tuple[int, ...], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=max(sizes))
    groups = {size: dist.new_group(range(size)) for size in sizes}
    while True:
        size, work, args = pickle.loads(pipe.recv_bytes())
        try:
            result = work(groups[size], *args)
        except Exception as error:
            result = error
        pipe.send_bytes(pickle.dumps(result))
