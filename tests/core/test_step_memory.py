"""The warm-up pass leaves no trace; a step that does not fit is done in halves, with the same update."""

import pytest
import torch
from frozen import freeze_norms
from toy import make_toy

from mmdet.core.hooks import Hook
from mmdet.core.memory import OUT_OF_MEMORY, DoesNotFitError
from mmdet.core.run import RunOptions
from mmdet.core.trainer import Trainer
from mmdet.exp import get_exp
from mmdet.families.yolox.exp import YOLOXExp

WORDS = (
    "width=0.25",
    "depth=0.33",
    "batch_size=4",
    "recipe_batch_size=4",
    "input_size=96",
    "test_size=96",
    "max_epoch=1",
    "print_interval=1",
    "multiscale=(1,1)",
    "eval_interval=5",
)


def trainer_of(folder, *words, exp="ppyoloe_s", model=None, **options):
    make_toy(folder / "toy", 12, 2)
    exp = get_exp(f"exps/{exp}.py", [*WORDS, f"data_dir={folder / 'toy'}", f"output_dir={folder / 'out'}", *words])
    if model is not None:
        exp.__dict__["get_model"] = lambda: model(type(exp).get_model(exp))
    trainer = Trainer(exp, RunOptions(workers=0, device="cpu", progress=False, experiment_name="a", **options))
    trainer.evaluator = None
    return trainer


class Stop(Hook):
    """Ends a run after two steps."""

    def on_step_end(self, trainer):
        if trainer.step == 2:
            raise StopIteration


def two_steps(trainer):
    trainer.hooks.append(Stop())
    with pytest.raises(StopIteration):
        trainer.train()
    return trainer


def log_of(trainer):
    return (trainer.run_dir / "train_log.txt").read_text()


@pytest.mark.parametrize("exp", ["ppyoloe_s", "yolox_nano"])
def test_the_warm_up_pass_leaves_no_trace(tmp_path, exp):
    words = ("multiscale=(0.7,1.4)",)
    plain = two_steps(trainer_of(tmp_path / "plain", "warmup_pass=off", *words, exp=exp))
    warm = two_steps(trainer_of(tmp_path / "warm", "warmup_pass=on", *words, exp=exp))
    for one, other in ((plain.model.state_dict(), warm.model.state_dict()), (plain.ema.averaged(), warm.ema.averaged())):
        assert all(torch.equal(v, other[k]) for k, v in one.items())
    losses = [[p.split("|")[1] for p in log_of(t).splitlines() if " eta " in p] for t in (plain, warm)]
    assert losses[0] == losses[1]
    assert "warm-up pass" not in log_of(plain)
    boxes = 1 if exp == "ppyoloe_s" else 4  # yolox_nano: mosaic, without mix-up
    wanted = f"warm-up pass: 4 images, size 128x128, up to {boxes} boxes in an image: peak memory"
    assert wanted in log_of(warm)


def test_the_most_boxes_of_a_mosaic_with_mix_up(tmp_path):
    make_toy(tmp_path / "toy", 3, 1)
    exp = YOLOXExp()
    exp.set("data_dir", str(tmp_path / "toy"), "command line")
    assert exp.most_boxes() == 5
    exp.set("mosaic_prob", 0.0, "command line")
    assert exp.most_boxes() == 1


def limited(images):
    """A model for whose forward pass the memory has room for so many images only."""

    def limit(model):
        forward = model.forward

        def checked(batch):
            if model.training and torch.is_grad_enabled() and len(batch) > images:
                raise OUT_OF_MEMORY("CUDA out of memory")
            return forward(batch)

        model.forward = checked
        return model

    return limit


@pytest.mark.parametrize("exp", ["ppyoloe_s", "yolox_nano"])
@pytest.mark.parametrize("room", [2, 1])
def test_a_step_that_does_not_fit_is_done_in_parts(tmp_path, exp, room):
    batch = {2: 4, 1: 3}[room]  # three images cannot be halved: one by one
    words = (f"batch_size={batch}", "clip_norm=0", "warmup_pass=off")

    def model(room):
        return lambda m: limited(room)(freeze_norms(m).double())

    whole = two_steps(trainer_of(tmp_path / "whole", *words, exp=exp, model=model(99)))
    parts = two_steps(trainer_of(tmp_path / "parts", *words, exp=exp, model=model(room)))
    for name, value in whole.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(parts.model.state_dict()[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert parts.step == 2
    told = [line for line in log_of(parts).splitlines() if "out of memory" in line]
    assert len(told) == 1 and "size 96x96" in told[0] and "in an image" in told[0] and "grad_accum" in told[0]


def test_batch_norm_statistics_are_those_of_the_parts_only(tmp_path):
    """Not moved by the attempt that failed, nor by the pass that finds the divisors."""
    trainer = two_steps(trainer_of(tmp_path, "warmup_pass=off", model=limited(2)))
    counts = {int(v) for k, v in trainer.model.state_dict().items() if k.endswith("num_batches_tracked")}
    assert counts == {4}  # two halves in each of two steps


def test_what_does_not_fit_at_all_says_what_to_do(tmp_path):
    with pytest.raises(DoesNotFitError, match=r"on cpu at epoch 1/1 step 1/3.*4 images, size 96x96.*-b.*grad_accum=2"):
        trainer_of(tmp_path / "a", "warmup_pass=off", model=limited(1)).train()
    with pytest.raises(DoesNotFitError, match=r"in the warm-up pass.*size 96x96.*up to 1 boxes.*amp=fp16"):
        trainer_of(tmp_path / "b", "warmup_pass=on", model=limited(1)).train()
    with pytest.raises(DoesNotFitError, match="single image"):
        trainer_of(tmp_path / "c", "warmup_pass=off", "batch_size=1", model=limited(0)).train()
