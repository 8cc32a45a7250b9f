"""The log that all ranks share, and numbers that outlive full disks and broken lines."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loguru import logger

from mmdet.core import logger as log
from mmdet.core.failure import RankError
from mmdet.core.recorder import Recorder
from mmdet.errors import UsageError

RANK = """
import sys, time
from pathlib import Path
from loguru import logger
from mmdet.core import logger as log
rank, path = int(sys.argv[1]), Path(sys.argv[2])
log.setup_logging(rank)
logger.warning("all ranks say this while they build")
if rank:
    while not path.exists(): time.sleep(0.02)
log.open_log_file(path)
logger.info(f"information of {rank}")
logger.warning("all ranks say this in a step")
for i in range(200):
    logger.error(f"rank {rank} line {i} " + "x" * 100)
logger.warning(f"only rank {rank} says this")
error = ValueError(f"boom {rank}") if rank == 1 else RuntimeError("connection lost")
log.report_failure(error, "step 3", None, secondary=rank != 1)
log.close_log_file()
"""


def start_ranks(ranks, path, code=RANK):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen([*command, str(r), str(path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(ranks)
    ]
    done = [process.communicate(timeout=120) for process in running]
    assert [p.returncode for p in running] == [0] * ranks, done
    return [err for _, err in done]


def test_ranks_write_one_log_line_by_line(tmp_path):
    console = start_ranks(3, tmp_path / "train_log.txt")
    text = (tmp_path / "train_log.txt").read_text()
    lines = text.splitlines()
    for rank in range(3):
        prefix = f"[rank {rank}] " if rank else ""
        tail = "x" * 100
        found = [line.partition("| ERROR   | ")[2] for line in lines if f"rank {rank} line" in line]
        assert found == [f"{prefix}rank {rank} line {i} {tail}" for i in range(200)]  # whole, and in order
        assert sum(line.endswith(f"| WARNING | {prefix}only rank {rank} says this") for line in lines) == 1
        assert (f"information of {rank}" in text) == (rank == 0)
    assert text.count("all ranks say this while they build") == 1 and text.count("all ranks say this in a step") == 1
    assert "[rank 1] \nTraceback" not in text and "ValueError: boom 1" in text
    follows = "stopped at step 3, since another rank failed (RuntimeError: connection lost)"
    assert text.count(follows) == 1 and text.count("ValueError: boom 1") >= 1
    assert "stopped at step 3: ValueError: boom 1" in console[1] and "[rank 1]" in console[1]
    assert "WARNING" not in console[1] and "WARNING" in console[0] and follows in console[0] and follows not in console[2]


def test_a_rank_that_does_not_see_the_log_tells_the_console(tmp_path):
    code = RANK.replace(
        "if rank:\n    while not path.exists(): time.sleep(0.02)\n", "path = path if rank == 0 else Path('/nowhere/x')\n"
    )
    console = start_ranks(2, tmp_path / "train_log.txt", code)
    assert "only rank 1" not in (tmp_path / "train_log.txt").read_text()
    assert "[rank 1] only rank 1 says this" in console[1] and "is not to be seen from this machine" in console[1]
    assert not Path("/nowhere").exists()


def test_a_secondary_failure_is_one_short_line():
    lines = []
    sink = logger.add(lambda m: lines.append(str(m)), format="{level} {message}")
    error = RankError(1, "ValueError: " + "boom\n" * 500, "traceback")
    log.report_failure(error, "step 3", None, secondary=True)
    logger.remove(sink)
    assert len(lines) == 1 and lines[0].startswith(
        "WARNING stopped at step 3, since another rank failed (RankError: rank 1 failed"
    )
    assert len(lines[0]) < 300 and lines[0].count("\n") == 1 and error.reported


def test_a_user_error_leaves_its_traceback_in_the_file_only(tmp_path):
    log.keep_for_log_file(1)
    (tmp_path / "log.txt").touch()
    log.open_log_file(tmp_path / "log.txt")
    log.report_failure(UsageError("wrong"), "the start", tmp_path)
    log.close_log_file()
    text = (tmp_path / "log.txt").read_text()
    assert text.startswith("[rank 1] ") and "UsageError: wrong" in text.splitlines()[-1] and "[rank 1]" in text.splitlines()[-1]
    log.keep_for_log_file(0)


# -- numbers --------------------------------------------------------------------------------------------------------------------


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_that_was_cut_off_is_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    recorder = Recorder(True, progress=False)
    recorder.open(tmp_path, resumed=(1, tmp_path / "last.pth"))
    recorder.numbers("norms", 2, {"a": 1.0})
    recorder.close()
    mark = {"kind": "resume", "step": 1, "event": "resume", "from": str(tmp_path / "last.pth")}
    assert metrics(tmp_path) == [{"kind": "train", "step": 1}, mark, {"kind": "norms", "step": 2, "values": {"a": 1.0}}]
    (tmp_path / "metrics.jsonl").write_text('{"kind": "tra')
    recorder.open(tmp_path)
    recorder.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_numbers_that_find_no_room_do_not_end_a_run(tmp_path, monkeypatch):
    lines = []
    sink = logger.add(lambda m: lines.append(str(m)), format="{message}")
    write = os.write
    room = [10**9]

    def limited(handle, data):
        part = data[: room[0]] if len(data) > 20 else data
        room[0] -= len(part)
        if data and not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, part)

    recorder = Recorder(True, progress=False)
    recorder.open(tmp_path)
    monkeypatch.setattr("os.write", limited)
    for step in range(1, 7):
        room[0] = 10**9 if step in (1, 2, 5, 6) else 25  # half a line, then nothing
        recorder.numbers("norms", step, {"value": 0.5})
    monkeypatch.undo()
    recorder.close()
    logger.remove(sink)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 5, 6]
    assert "".join(lines).count("metrics.jsonl cannot be written (No space left on device)") == 1


def test_tensorboard_that_fails_is_given_up(tmp_path, monkeypatch):
    recorder = Recorder(True, progress=False)
    recorder.open(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder._writer._board, "add_scalar", full)
    for step in range(3):
        recorder.numbers("norms", step, {"value": 0.5})
    recorder.close()
    assert len(metrics(tmp_path)) == 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_what_cannot_be_opened_is_left_out(tmp_path, name):
    if name == "tensorboard":
        (tmp_path / name).write_text("a file in the folder's place")
    else:
        (tmp_path / name).mkdir()
    recorder = Recorder(True, progress=False)
    recorder.open(tmp_path)
    recorder.numbers("norms", 1, {"value": 0.5})
    recorder.close()
    assert name == "metrics.jsonl" or len(metrics(tmp_path)) == 1
