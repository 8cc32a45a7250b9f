"""The tracker of ST-20, trained once for all slow tests that need one."""

import time
from types import SimpleNamespace

import pytest

from mmdet.core import Trainer
from mmdet.core.run import RunOptions
from mmdet.exp import get_exp


@pytest.fixture(scope="session")
def trained_tiny(tmp_path_factory):
    """``siamese_tiny`` after 300 iterations on moving shapes: ``exp``, ``trainer``, ``run_dir`` and ``seconds`` of training,
    evaluation included, as wall time and of this process."""
    exp = get_exp("siamese_tiny")
    values = {"data_dir": "demo", "output_dir": str(tmp_path_factory.mktemp("tiny")), "max_epoch": 10, "self_epoch": 8}
    for name, value in {**exp.demo_settings(), **values, "eval_interval": 10}.items():
        exp.set(name, value, "--demo")
    trainer = Trainer(exp, RunOptions(device="cpu", workers=1, progress=False, experiment_name="a"))
    start, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    seconds = time.perf_counter() - start, time.process_time() - cpu
    return SimpleNamespace(exp=exp, trainer=trainer, run_dir=trainer.run_dir, seconds=seconds)
