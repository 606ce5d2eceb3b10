"""How pytest-xdist spreads the suite: all tests of one case to one worker, every other test by itself."""

import re

from xdist.scheduler import LoadScopeScheduling

_CASE = re.compile(r"\[(?P<model>[a-z0-9_]+)/[a-z0-9_.]+-[a-z0-9]+-(?P<case>[a-z0-9_]+)\]$")


class CaseScheduling(LoadScopeScheduling):
    """Scopes are cases."""

    def _split_scope(self, nodeid: str) -> str:
        found = _CASE.search(nodeid)
        return f"{found['model']}-{found['case']}" if found else nodeid
