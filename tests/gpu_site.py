"""A place where a model is served from a GPU, this host's or a fake one."""

from pathlib import Path
from typing import Any

from tests import gpu_process
from tests.sites import Site


class GpuSite(Site):
    """Its keeper, loaders and commands are real processes, which see this GPU alone."""

    def __init__(self, folder: Path, checkpoint: Path, uuid: str, *, fake: bool, **settings: Any) -> None:
        self._uuids = (uuid,)
        self._fake = fake
        super().__init__(folder, checkpoint, gpus=[uuid], **settings)
        self._python = gpu_process.make_python(folder / "python")

    @property
    def python(self) -> str:
        return str(self._python)

    @property
    def environment(self) -> dict[str, str]:
        return gpu_process.environment(self._python, self._uuids, fake=self._fake)
