"""What to go on from is rank 0's decision, and its failure is everybody's."""

import torch
from dist import run_ranks
from toy_task import line_exp

from mmdet.core import RunOptions, Trainer, resume, run
from mmdet.core.distributed import get_rank
from mmdet.core.files import checksum, read_checkpoint


def options(words):
    return RunOptions(device="cpu", workers=0, progress=False, resume=words)


def look(folder, words, sees):
    """What a rank makes of it; ranks that are not in ``sees`` have another disk than rank 0."""
    kept = resume._fingerprint, resume.read_full_state
    if get_rank() not in sees:
        resume._fingerprint = lambda path: (0, 0)
        resume.read_full_state = None  # must not be called
    try:
        found = resume.open_resume(line_exp(folder), options(words))
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resume._fingerprint, resume.read_full_state = kept
    if found is None:
        return "fresh", str(run.new_run_dir(folder / "line", ""))
    return str(found.path), checksum(found.saved)


def look_at_all(cases):
    return [look(*case) for case in cases]


def test_all_ranks_hear_the_same(tmp_path):
    trainer = Trainer(line_exp(tmp_path / "good"), RunOptions(device="cpu", workers=0, progress=False, experiment_name="a"))
    trainer.train()
    last = trainer.run_dir / "last.pth"
    (tmp_path / "bad" / "line" / "a").mkdir(parents=True)
    torch.save({"model": {}}, tmp_path / "bad" / "line" / "a" / "last.pth")
    good, none, bad = tmp_path / "good", tmp_path / "none", tmp_path / "bad"
    cases = [(good, "auto", (0, 1)), (good, "", (0,)), (none, "auto", (0, 1)), (bad, "auto", (0, 1)), (none, "", (0, 1))]
    first, second = run_ranks(2, look_at_all, 120, cases)
    wanted = (str(last), checksum(read_checkpoint(last)))
    assert first[:2] == second[:2] == [wanted] * 2  # with a file that all see, and with one that only rank 0 sees
    assert first[2][0] == "fresh" and first[2] == second[2]
    for i, words in ((3, "last.pth"), (4, "no run with a checkpoint")):
        assert first[i][0] == "CheckpointError" and second[i][0] == "RankError" and words in second[i][1]
