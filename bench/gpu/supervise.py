"""`python -m bench.gpu.supervise RIG`: `appliance up`'s supervisor over the bench's keeper, told what to do on stdin.

Commands, a line each: kill, restart, stop. Each is answered with a line of its own, the unit's state.
"""

import asyncio
import sys
from pathlib import Path

from appliance.up.description import UnitDescription
from appliance.up.supervisor import Supervisor
from appliance.up.units import STORE_LIMIT
from bench.gpu.device import environment
from bench.gpu.rig import Rig, read_rig

KEEPER = "weights@bench"


class Stderr:
    """Shows the unit's lines as they come."""

    def line(self, name: str, text: str, *, serious: bool = False) -> None:
        print(f"{name} | {text}", file=sys.stderr, flush=True)


async def main(rig: Rig) -> None:
    unit = UnitDescription(
        name=KEEPER, argv=rig.keeper_argv, environment=environment(), store_limit=STORE_LIMIT, start_timeout_s=300
    )
    runtime = rig.folder / "up"
    runtime.mkdir(exist_ok=True)
    commands: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: commands.put_nowait(sys.stdin.readline().strip()))
    async with Supervisor([unit], Stderr(), runtime=runtime) as supervisor:
        while command := await commands.get():
            if command == "kill":
                await supervisor.kill(KEEPER)
            elif command == "restart":
                await supervisor.restart(KEEPER)
            elif command == "stop":
                await supervisor.stop(KEEPER)
            print(supervisor.status(KEEPER).state, flush=True)


if __name__ == "__main__":
    asyncio.run(main(read_rig(Path(sys.argv[1]))))
