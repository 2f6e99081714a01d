"""Start the ranks of a section and see to their end: all on this machine, or one of torchrun's.

Contract
    The first rank's driver says what is run and when; the others' follow. No process of a section
    is left when `run` returns. While time is left a section whose ranks ended before it did goes on
    in new ones, behind the item that they ended in; not where they had begun none.
    Ranks have the variables that the caller names, where the user has set nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from moe_compile.check.limited_process import run_ranks
from moe_compile.check.sections import GRACE_S, ended, read_section, say
from moe_compile.testing.rank_pool import HOST, meeting_point

PATIENCE_S: Final = 20.0
"""For the other ranks once one has failed."""
LEAST_S: Final = 20.0
"""With less time left no new processes are started."""
FOLLOW_S: Final = 3600.0
"""For which a driver waits for the first to say what is next."""
END: Final = ""
OF_AGENT: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether torchrun itself has the store where its ranks meet."""
OF_TORCHRUN: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""What torchrun tells each rank, and a rank of a section is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What all drivers start next; a section without a name is the end."""

    section: str
    attempt: int = 0
    seconds: float = 0.0


class Ranks:
    """The ranks that this process starts, and how drivers of ranks hear of each other."""

    def __init__(
        self,
        out: Path,
        device: str,
        num_local: int,
        module: str,
        *,
        settings: Mapping[str, str],
        words: Sequence[str] = (),
    ) -> None:
        """Be the only driver, of `num_local` ranks, or that of a rank that torchrun started.

        A rank of a section runs `module`, given `words` besides its own arguments, with `settings`
        in its environment.
        """
        self._out, self._device, self._module = out, device, module
        self._settings, self._words = dict(settings), words
        self._num_orders = 0
        self._is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if self._is_torchrun:
            self._environments = [{name: os.environ[name] for name in OF_TORCHRUN}]
            timeout = timedelta(seconds=FOLLOW_S)
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            is_owner = os.environ["RANK"] == "0" and os.environ.get(OF_AGENT) != str(True)
            store: dist.Store = dist.TCPStore(*address, is_master=is_owner, timeout=timeout)
        else:
            store = self._owned = meeting_point()
            self._environments = [
                {
                    "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_local),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(num_local),
                    "MASTER_ADDR": HOST,
                    "MASTER_PORT": str(self._owned.port),
                }
                for rank in range(num_local)
            ]
        self._store = dist.PrefixStore("drivers", store)
        self.rank = int(self._environments[0]["RANK"])
        self.num_ranks = int(self._environments[0]["WORLD_SIZE"])

    def run(self, section: str, seconds: float) -> dict[str, Any]:
        """Run a section for so long; return what became of it. For the first driver."""
        say(f"section {section} may take up to {seconds:.0f} s")
        began, attempt, num_begun = time.monotonic(), 0, 0
        while True:
            left_s = seconds - (time.monotonic() - began)
            code = self._do(Order(section=section, attempt=attempt, seconds=left_s))
            found = read_section(self._out, section)
            num_known, num_begun = num_begun, len(found.get("begun", ()))
            is_over = found.get("is_complete") or left_s < LEAST_S + PATIENCE_S
            is_over = is_over or num_begun == num_known  # new ones would end at the same place
            if code == 0 or is_over or seconds - (time.monotonic() - began) < LEAST_S:
                break
            attempt += 1
            say(
                f"section {section}: its ranks ended before it was done; new ranks skip the "
                "item that failed and do the rest"
            )
        if code and not found.get("is_complete") and not found.get("begun"):
            found = {**found, "failures": [{"what": f"section {section}: its ranks did not start"}]}
        return ended(code, found, time.monotonic() - began)

    def end(self) -> None:
        """Send the other drivers home. For the first driver."""
        if self._is_torchrun:
            self._do(Order(section=END))

    def follow(self) -> None:
        """Do what the first driver says until it says that it is over. For all others."""
        while self._do(None) is not END:
            pass

    def _do(self, order: Order | None) -> Any:
        """Start what is ordered, or is to be heard from the first driver; return how it ended."""
        self._num_orders += 1
        key = f"order/{self._num_orders}"
        if order is None:
            order = Order(**json.loads(self._store.get(key)))
        elif self._is_torchrun:
            self._store.set(key, json.dumps(asdict(order)))
        if order.section == END:
            return END
        codes = self._start(order)
        if self._is_torchrun:
            codes = self._codes_of_all(key, codes[0])
        return next((code for code in codes if code), None if None in codes else 0)

    def _codes_of_all(self, key: str, code: int | None) -> list[int | None]:
        self._store.set(f"{key}/{self.rank}", json.dumps(code))
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.num_ranks)]

    def _start(self, order: Order) -> list[int | None]:
        command = [sys.executable, "-m", self._module, order.section]
        command += [f"--out={self._out}", f"--device={self._device}"]
        command += [f"--budget-s={order.seconds - GRACE_S}", f"--attempt={order.attempt}"]
        command += self._words
        suffix = f"_again{order.attempt}" if order.attempt else ""
        ranks = [environment["RANK"] for environment in self._environments]
        return run_ranks(
            [command] * len(ranks),
            [self._out / f"{order.section}_rank{rank}{suffix}.log" for rank in ranks],
            order.seconds,
            [environment_of(self._settings | own) for own in self._environments],
            patience_s=PATIENCE_S,
        )


def environment_of(own: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment: what the user has set, then what is its own."""
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}
