"""Which files of the tests the processes of one run take, and in what order: `./install.sh --test` starts several.

A file's tests stay together, in their order, but for SCATTERED ones, and so do all files of a folder whose hosts are
installed once.
"""

from xdist.scheduler import LoadScopeScheduling

# Minutes each. Begun last, one of them would keep a single process busy while the others have nothing left to do.
LONG = (
    "tests/host",
    "tests/parity/test_rows.py",
    "tests/vllm/test_layouts.py",
    "tests/vllm/test_real_model.py",
    "tests/vllm/test_caches.py",
    "tests/test_equivalence.py",
    "tests/systemd/test_bundle.py",
    "tests/systemd/test_install.py",
    "tests/test_repository.py",
)
# Their hosts share this machine's ports, besides.
TOGETHER = ("tests/host",)
# Each of these waits for processes of its own, on machines with many cores: one after the other they take minutes.
SCATTERED = ("tests/gpu/test_engine.py",)


class Schedule(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out files in the order in which they were collected."""

    def schedule(self) -> None:
        # It would put files of many tests first, and those are of short ones.
        self.config.option.loadscopereorder = False
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        if any(_is_of(nodeid, path) for path in SCATTERED):
            return nodeid
        return next((folder for folder in TOGETHER if _is_of(nodeid, folder)), nodeid.partition("::")[0])


def place(nodeid: str) -> int:
    """Return a number to sort tests by: files of LONG come first, in its order."""
    return next((number for number, path in enumerate(LONG) if _is_of(nodeid, path)), len(LONG))


def _is_of(nodeid: str, path: str) -> bool:
    return nodeid.startswith((f"{path}/", f"{path}::"))
