import errno
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import HostError, ResourceError
from appliance.run import Completed, ending, run

TIMEOUT_S = 20.0


def python(code: str, *arguments: str, **options: Any) -> Completed:
    options.setdefault("timeout_s", TIMEOUT_S)
    return run([sys.executable, "-I", "-S", "-c", code, *arguments], **options)


def ends(pid: int) -> bool:
    """Wait for a process that was killed; False if it lives on."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], TIMEOUT_S)[0])
    finally:
        os.close(pidfd)


def test_both_outputs_and_the_status_come_back() -> None:
    done = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", accept=(0, 3))
    assert done == Completed(3, "out\n", "err\n")


def test_an_argument_is_one_argument_whatever_is_in_it() -> None:
    assert python("import sys; print(sys.argv[1:])", "a b; $(id) 'x'", "").stdout == "[\"a b; $(id) 'x'\", '']\n"


def test_the_message_names_the_command_and_its_last_line_of_standard_error() -> None:
    with pytest.raises(HostError) as caught:
        python(
            "import sys; print('warning', file=sys.stderr); print('no such device\\n', file=sys.stderr); sys.exit(3)"
        )
    message = caught.value.message
    assert sys.executable in message
    assert message.endswith(": exited with status 3: no such device")


def test_a_command_that_a_signal_ended_says_which() -> None:
    with pytest.raises(HostError, match=r"ended by SIGKILL$"):
        python("import os; os.kill(os.getpid(), 9)")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(HostError, match=r"^no-such-program-here: no such program") as caught:
        run(["no-such-program-here"], timeout_s=TIMEOUT_S)
    assert caught.value.hint is not None


def test_a_folder_that_is_not_there_is_not_taken_for_the_program(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no such directory to run"):
        run(["true"], timeout_s=TIMEOUT_S, directory=tmp_path / "gone")


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="cannot be started: Permission denied"):
        run([tmp_path / "file"], timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_machine_that_is_short_of_processes_may_have_some_later(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ResourceError, match="cannot be started"):
        run(["true"], timeout_s=TIMEOUT_S)


def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import os, sys, time; os.fork(); open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"not finished after 0\.5 s"):
        python(code, str(pids), timeout_s=0.5)
    assert time.monotonic() - started < 10
    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_a_child_left_behind_neither_delays_the_result_nor_survives_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "print('done', flush=True)\n"
        "open(sys.argv[1], 'w').write(str(child))\n"
    )
    assert python(code, str(pid_file), timeout_s=10).stdout == "done\n"
    assert ends(int(pid_file.read_text()))


def test_output_beyond_the_limit_ends_the_program_early() -> None:
    with pytest.raises(HostError, match="wrote more than 100000 bytes"):
        python("while True: print('x' * 1000)", limit_bytes=100_000)


def test_output_up_to_the_limit_arrives_whole() -> None:
    done = python("import sys; sys.stdout.write('x' * 100000); sys.stderr.write('y' * 100000)", limit_bytes=100_000)
    assert (len(done.stdout), len(done.stderr)) == (100_000, 100_000)


def test_input_larger_than_a_pipe_reaches_the_program() -> None:
    assert python("import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * 500_000).stdout == "500000\n"


def test_without_input_the_program_reads_the_end_of_the_file() -> None:
    assert python("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_bytes_that_are_no_text_are_spelled_out() -> None:
    assert python("import os; os.write(1, b'\\xff\\n')").stdout == "\\xff\n"


def test_a_message_cannot_command_a_terminal() -> None:
    with pytest.raises(HostError) as caught:
        python("import sys; sys.exit('\\x1b[2Jgone\\x07')", "\x1b[31m")
    assert "\x1b" not in str(caught.value)


def test_the_environment_is_replaced_and_the_directory_changed(tmp_path: Path) -> None:
    done = python(
        "import os; print(os.environ.get('A'), 'HOME' in os.environ, os.getcwd())",
        environment={"A": "1"},
        directory=tmp_path,
    )
    assert done.stdout == f"1 False {tmp_path.resolve()}\n"


def test_a_descriptor_of_this_process_is_not_inherited() -> None:
    reading, writing = os.pipe()
    try:
        os.set_inheritable(writing, True)
        done = python("import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])")
        assert done.stdout == "[0, 1, 2]\n"
    finally:
        os.close(reading)
        os.close(writing)


def test_endings_are_words() -> None:
    assert ending(3) == "exited with status 3"
    assert ending(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert ending(-63) == "ended by signal 63"
