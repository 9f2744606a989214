"""How pytest-xdist deals checks out to its workers."""

import re

from xdist.scheduler import LoadScopeScheduling


def by_case(config, log, node: re.Pattern) -> LoadScopeScheduling:
    """A scheduler under which the checks of one case, which share its run, go to one worker.

    ``node`` finds the check id in a node id.
    """

    class ByCase(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            match = node.search(nodeid)
            return match[1].rpartition("[")[2] if match else nodeid

        def _reschedule(self, worker) -> None:
            if worker in self.registered_collections:  # else it replaces a crashed one and is still collecting
                super()._reschedule(worker)

    return ByCase(config, log)
