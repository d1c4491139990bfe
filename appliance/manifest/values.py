"""What a single setting of the manifest may hold: ports, hosts, paths, GPUs, CPU lists, images, durations.

Each type refuses what YAML lets through by accident: `port: "8001"`, `port: yes`, `~/models`.
"""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from appliance.errors import ConfigError
from appliance.quantities import parse_duration

MAX_PATH_BYTES = 4095  # PATH_MAX with its closing NUL is 4096
MAX_CPU = 8191  # the kernel's largest NR_CPUS

_MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
_HOST_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I)
_CPU_RANGE = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", re.ASCII)
# A reference as Podman takes it: registry, name, tag, digest; or an image's id.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def refusal(what: str, *, hint: str | None = None) -> PydanticCustomError:
    """Return the error that a validator raises; `hint` is the way out where there is only one."""
    return PydanticCustomError("refused", "{what}", {"what": what, "hint": hint})


def shown(value: object) -> str:
    """Return a value as a message quotes it: on one line, and never a page of it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a group of settings"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _model_name(value: str) -> str:
    if not _MODEL_NAME.fullmatch(value):
        what = f"{shown(value)} is no model name: it names units and folders, so 1 to 64 of a-z 0-9 . _ - are allowed"
        raise refusal(f"{what}, a letter or digit first")
    return value


def _path(value: object, info: ValidationInfo) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise PydanticKnownError("string_type")
    if len(value.encode()) > MAX_PATH_BYTES:
        raise refusal(f"has {len(value.encode())} bytes, and a path has at most {MAX_PATH_BYTES}")
    if any(ord(character) < 32 for character in value):
        raise refusal(f"{shown(value)} has a control character in it")
    if "://" in value:
        raise refusal(f"{shown(value)} is an address, and nothing is downloaded", hint="give the folder on this host")
    if value.startswith("~"):
        raise refusal(f"{shown(value)}: ~ is not expanded here", hint="write the path from the root on")
    if value.startswith("/"):
        return Path(value)
    folder = (info.context or {}).get("folder")
    if folder is None:
        raise refusal(f"{shown(value)} is relative, and there is no manifest file that it could be relative to")
    return Path(folder) / value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refusal("is empty" if value is None else f"{shown(value)} is no duration")
    try:
        return parse_duration(value)
    except ConfigError as error:
        raise refusal(error.message, hint=error.hint) from None


def _host(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        pass
    else:
        # ::ffff:127.0.0.1 is 127.0.0.1 by another name.
        return str(getattr(address, "ipv4_mapped", None) or address)
    # 10.0.0.300 would pass for a name.
    if _HOST_NAME.fullmatch(value) and not value.rpartition(".")[2].isdigit():
        return value.lower()
    raise refusal(f"{shown(value)} is neither an IP address nor a host name")


def _gpu(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024:
        return value
    if isinstance(value, str) and _GPU_UUID.fullmatch(value):
        return value[:4].upper() + value[4:].lower()
    raise refusal(f"{shown(value)} is neither a GPU index nor a UUID", hint="`nvidia-smi -L` lists both")


def _cpus(value: object) -> tuple[int, ...]:
    if value is None:
        raise refusal("is empty")
    numbers: set[int] = set()
    for part in _parts(value):
        match = None if isinstance(part, bool) else _CPU_RANGE.fullmatch(str(part))
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if not first <= last <= MAX_CPU:
            raise refusal(f"{shown(part)} is no CPU or range of CPUs", hint='write it like "0-3" or "0-3,8"')
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def _parts(value: object) -> Sequence[object]:
    if isinstance(value, str):
        return value.split(",")
    return value if isinstance(value, list | tuple) else [value]


def _image(value: str) -> str:
    if not _IMAGE.fullmatch(value):
        raise refusal(f"{shown(value)} is no container image", hint="write it like localhost/appliance-engine:1")
    return value


def _environment_name(value: str) -> str:
    if not _ENVIRONMENT_NAME.fullmatch(value):
        raise refusal(f"{shown(value)} is no name of an environment variable")
    return value


def _word(value: object) -> str:
    if value is None:
        raise refusal("is empty", hint='write "" if nothing is meant')
    # 1.10 would come out as 1.1, and `no` as False: only what reads back as it was written may go without quotes.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise PydanticKnownError("string_type")
    return str(value)


ModelName = Annotated[str, AfterValidator(_model_name), StringConstraints(strict=True)]
Text = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
Word = Annotated[str, PlainValidator(_word), WithJsonSchema({"type": ["string", "integer"]})]
AbsolutePath = Annotated[Path, PlainValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]
Host = Annotated[str, StringConstraints(strict=True), AfterValidator(_host)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Count = Annotated[int, Field(strict=True, ge=1, le=65536)]
Gpu = Annotated[
    int | str,
    PlainValidator(_gpu),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^(GPU|MIG)-"}]}),
]
Cpus = Annotated[
    tuple[int, ...],
    PlainValidator(_cpus),
    # JSON has no tuples, and pydantic would warn that what it made of one is none.
    PlainSerializer(list, return_type=list[int], when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*\d+\s*(-\s*\d+)?\s*(,\s*\d+\s*(-\s*\d+)?\s*)*$"},
                {"type": "integer", "minimum": 0},
                {"type": "array", "items": {"type": ["integer", "string"]}},
            ]
        }
    ),
]
Seconds = Annotated[
    float,
    PlainValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]}),
]
Image = Annotated[str, StringConstraints(strict=True), AfterValidator(_image)]
EnvironmentName = Annotated[str, StringConstraints(strict=True), AfterValidator(_environment_name)]
