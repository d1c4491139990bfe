"""The repository as a whole: linters, which part may import which, and that the documents name what exists."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
import typer
import yaml

from appliance.cli.main import app
from appliance.manifest.load import load_manifest
from tests.tiers import cannot_run

ROOT = Path(__file__).parent.parent

# Each part of the package may import those before it, and no other.
PARTS = (
    *(
        "errors",
        "collector",
        "quantities",
        "lines",
        "descriptors",
        "memfd",
        "run",
        "notify",
        "events",
        "turns",
        "lifeline",
        "ports",
        "gpus",
        "inventory",
        "tenants",
    ),
    *("checkpoint", "manifest", "slabs", "layout", "configs"),
    *("fingerprint", "progress", "record", "verdict", "wire", "room", "target", "client", "canary"),
    *("keeper", "tensors", "handover"),
    *("vllm", "engine", "loader"),
    *("up", "host", "demo", "cli", "__main__"),
)
TORCH_PARTS = ("tensors", "handover", "engine", "vllm", "loader", "demo")  # these alone may need the extra `engine`
TORCH = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "accelerate", "huggingface_hub"}
# The keeper holds weights for months in under 50 MB. What these would do for it, a child process does.
NOT_IN_KEEPER = TORCH | {"pydantic", "yaml", "cryptography", "blake3", "typer", "rich"}
# Distributions that the name of the module does not lead to: not always installed, or part of another one.
HOMES = {"cuda": "cuda-bindings", "pynvml": "nvidia-ml-py", "vllm": "vllm", "pydantic_core": "pydantic"}

GENERIC_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "core", "tools"}
LINES_LIMIT = 400
# Spelled so that this file does not find itself.
DEVELOPER_PATHS = re.compile("/" + r"(home/[a-z]|Users/|work/)|\b" + "shared" + r"/(design|hooks|trials|gpu)\b")
TOOL_TIMEOUT_S = 280


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


MODULES = tracked("*.py")
PACKAGE = [module for module in MODULES if module.is_relative_to(ROOT / "appliance")]


def name_of(module: Path) -> str:
    return str(module.relative_to(ROOT))


@pytest.mark.parametrize("command", ["ruff format --check", "ruff check", "mypy"])
def test_the_linters_find_nothing(command: str) -> None:
    check(sys.executable, "-m", *command.split())


def test_shellcheck_finds_nothing_in_any_script() -> None:
    scripts = [file for file in tracked() if file.suffix == ".sh" or is_shell_script(file)]
    assert {"install.sh", ".ci/run"} <= {name_of(script) for script in scripts}
    if which("shellcheck") is None:
        cannot_run("shellcheck is not installed")
    check("shellcheck", *map(str, scripts))


def check(*argv: str) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def is_shell_script(file: Path) -> bool:
    with file.open("rb") as stream:
        return re.match(rb"#!.*\b(ba|da)?sh\b", stream.readline()) is not None


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    found = {module.relative_to(ROOT / "appliance").parts[0].removesuffix(".py") for module in PACKAGE} - {"__init__"}
    assert found <= set(PARTS), "say in PARTS what they may import"
    assert sorted(PARTS) == sorted(set(PARTS))


@pytest.mark.parametrize("module", PACKAGE, ids=name_of)
def test_imports_point_one_way(module: Path) -> None:
    part = module.relative_to(ROOT / "appliance").parts[0].removesuffix(".py")
    may_import = {part, "__version__", *PARTS[: PARTS.index(part)]} if part in PARTS else set()
    for name, line in imported(module):
        top, _, rest = name.partition(".")
        if top == "appliance" and rest:
            assert rest.split(".")[0] in may_import, f"{name_of(module)}:{line}: {name} lies above {part}"
        assert top not in TORCH or part in TORCH_PARTS, f"{name_of(module)}:{line}: {part} must do without {top}"


def test_the_keeper_loads_nothing_heavy() -> None:
    code = """
import importlib, json, pkgutil, sys
import appliance.keeper
for module in pkgutil.walk_packages(appliance.keeper.__path__, "appliance.keeper."):
    importlib.import_module(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(printed))
    assert "aiohttp" in loaded
    assert loaded & NOT_IN_KEEPER == set()


def test_every_third_party_import_is_declared() -> None:
    """What an import outside the torch parts needs at once must come with the base install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {distribution(requirement) for requirement in project["dependencies"]}
    extras = {distribution(each) for extra in project["optional-dependencies"].values() for each in extra}
    homes = importlib.metadata.packages_distributions()
    ours = {"appliance", "tests", "bench", *(module.stem for module in MODULES if "bench" in module.parts)}
    for module in MODULES:
        in_base = module in PACKAGE and module.relative_to(ROOT / "appliance").parts[0] not in TORCH_PARTS
        at_once = {name for name, _ in imported(module, top_level_only=True)}
        for name, line in imported(module):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in ours:
                continue
            declared = base if in_base and name in at_once else base | extras
            candidates = {distribution(home) for home in [HOMES.get(top, top), *homes.get(top, [])]}
            assert candidates & declared, f"{name_of(module)}:{line}: {top} is not declared in pyproject.toml"


def distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported(module: Path, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    tree = ast.parse(module.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(module)}:{node.lineno}: relative import"
            # `from appliance import wire` is an import of appliance.wire.
            names = [f"appliance.{alias.name}" for alias in node.names] if node.module == "appliance" else [node.module]
            yield from ((name or "", node.lineno) for name in names)


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_a_module_is_about_one_thing_and_says_what(module: Path) -> None:
    text = module.read_text()
    # A test module is named after what it tests, and its tests say the rest.
    says_what = module.name.startswith("test_") or bool(ast.get_docstring(ast.parse(text)))
    assert says_what, "no docstring"
    lines = text.count("\n")
    assert lines <= LINES_LIMIT, "split it at its second noun"
    assert module.stem not in GENERIC_NAMES and module.parent.name not in GENERIC_NAMES, (
        "name it after what it is about"
    )


def test_no_file_knows_where_it_was_written() -> None:
    found = [
        f"{name_of(file)}:{number}: {line.strip()}"
        for file in tracked()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if DEVELOPER_PATHS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "NEWS.md"])
def test_every_command_in_the_documents_exists(document: str) -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    usage = subprocess.run([ROOT / "install.sh", "--help"], capture_output=True, text=True, check=True).stdout
    text = (ROOT / document).read_text()
    named = re.findall(r"(?:^|`|bin/)appliance ([a-z]+)\b", text, re.MULTILINE)
    options = re.findall(r"\./install\.sh (--[a-z]+)", text)
    assert document == "NEWS.md" or (named and options)
    assert set(named) <= commands
    assert all(option in usage for option in options)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "NEWS.md"])
def test_every_file_that_a_document_links_to_or_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    paths = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", text)
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_the_readmes_manifest_is_right_and_so_are_settings_put_into_its_model(tmp_path: Path) -> None:
    whole, *parts = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    for part in ("", *parts):
        manifest = yaml.safe_load(whole)
        manifest["models"]["support-bot"] |= yaml.safe_load(textwrap.dedent(part)) or {}
        (file := tmp_path / "appliance.yaml").write_text(yaml.safe_dump(manifest))
        assert list(load_manifest(file).models) == ["support-bot"]


def test_ci_runs_the_readmes_test_command() -> None:
    run = (ROOT / ".ci" / "run").read_text()
    assert "./install.sh --test\n" in (ROOT / "README.md").read_text()
    assert re.search(r"^exec \./install\.sh --test( <|$)", run, re.MULTILINE)
    assert all(os.access(ROOT / name, os.X_OK) for name in ("install.sh", ".ci/run"))
