"""MT-09, MT-11, MT-20, MT-21, MT-23, MT-24: the model, its objective, parameter groups and what files fill it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from mt_ranks import Same, Tiny, linear_task, value_batch
from mt_toy import Backbone, Neck, ToyExp, colours, detection, make_data, pairs, tags, toy_exp
from torch import nn

from mmdet.core.checkpoint import LoadOptions, load_pretrained
from mmdet.data.errors import DataError
from mmdet.data.structures import ImageMeta
from mmdet.errors import CheckpointError, UsageError
from mmdet.families.fcos.head import FCOSHead
from mmdet.families.fcos.loss import FCOSCriterion
from mmdet.families.multitask.batches import IterationBatch, LabelledBatch, TaskBatch, pair_up
from mmdet.families.multitask.exp import check_groups
from mmdet.families.multitask.heads import BinaryCrossEntropy, CrossEntropy, PairLogistic, multilabel_top1, top1
from mmdet.families.multitask.model import MultiTaskModel, TaskView
from mmdet.families.multitask.parallel import MultiTaskParallel
from mmdet.families.multitask.sources import CocoFolder
from mmdet.families.multitask.task import TaskSpec
from mmdet.families.ppyolo.anchors import Anchors
from mmdet.families.ppyolo.head import PPYOLOHead
from mmdet.families.ppyolo.loss import PPYOLOCriterion
from mmdet.families.ppyoloe.head import ETHead
from mmdet.families.ppyoloe.loss import PPYOLOECriterion
from mmdet.families.yolox.head import DecoupledHead
from mmdet.families.yolox.loss import YOLOXCriterion
from mmdet.models.fpn import FPN


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("mt"))


class EverythingExp(ToyExp):
    """Every kind of task, and a detection head of each family."""

    tasks = [
        detection("yolox", "a", 3),
        TaskSpec(
            "ppyoloe",
            "detection",
            CocoFolder("b", 2),
            2,
            lambda c: ETHead(c, 2),
            levels=(2, 1, 0),
            criterion=lambda: PPYOLOECriterion(2, static_assigner_epoch=1),
        ),
        TaskSpec(
            "ppyolo",
            "detection",
            CocoFolder("b", 2),
            2,
            lambda c: PPYOLOHead(c, 2, ANCHORS),
            levels=(2, 1, 0),
            criterion=lambda: PPYOLOCriterion(2, ANCHORS),
        ),
        TaskSpec(
            "fcos",
            "detection",
            CocoFolder("a", 3),
            2,
            lambda c: FCOSHead(c[0], 3, (8, 16, 32, 64)),
            share={"backbone": 0, "neck": 1},
            neck=lambda c: ListedFPN(c),
            criterion=lambda: FCOSCriterion(3, level_bounds=(16.0, 32.0, 64.0)),
        ),
        colours(),
        tags(),
        pairs(),
    ]


ANCHORS = Anchors(((8, 8), (16, 16), (32, 32)), ((2,), (1,), (0,)), (32, 16, 8))


class ListedFPN(FPN):
    """FPN with four levels, and their channels."""

    def __init__(self, channels):
        super().__init__(channels, 32, 1)
        self.out_channels = (32,) * 4


@pytest.fixture(scope="module")
def everything(data):
    return toy_exp(EverythingExp, data_dir=str(data))


def first_batch(exp, rank=0, world=1):
    loader = exp.get_train_loader(0, rank, world)
    return next(loader.batches())


def test_every_kind_of_task_trains_and_is_judged(everything):
    model = everything.get_model()
    parallel = everything.get_parallel()
    network = parallel.wrap(model.train())
    batch = first_batch(everything)
    assert [part.task for part in batch.parts] == list(range(7)) and batch.facts()["images"] == 2 * 6 + 4
    names = everything.name_images(batch.image_ids)
    assert len(names) == 16 and names[0].startswith("yolox: ") and names[-1].endswith(".png")
    for part, weight in parallel.micro_batches(batch):
        out = network(part)
        name = model.names[part.task]
        assert all(k.startswith(f"{name}/") for k in out.losses) and f"loss/{name}" in out.stats
        assert float(out.total.detach()) == pytest.approx(float(out.stats[f"loss/{name}"]) / 7, rel=1e-5)
        (out.total * weight).backward()
    parallel.reduce_gradients(model)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert set(parallel.clip(model)) >= {"backbone", "neck/0", "neck/1", "head/fcos", "task/same"}
    evaluation = everything.get_evaluator(workers=0).evaluate(model)
    assert set(evaluation.metrics) == set(everything.metric_names()) and model.training
    metrics = evaluation.metrics
    assert metrics["AP_mean"] == pytest.approx(sum(metrics[f"{n}/AP"] for n in ("yolox", "ppyoloe", "ppyolo", "fcos")) / 4)
    assert metrics["top1"] == pytest.approx((metrics["cls/top1"] + metrics["tags/top1"] + metrics["same/top1"]) / 3)


def test_pictures_of_training_show_every_task(everything):
    batch = first_batch(everything)
    rows = everything.training_pictures(batch)
    assert len(rows) == 7 and all(row.dtype == np.uint8 and row.shape[2] == 3 for row in rows)
    single, pair = rows[4].shape[1], rows[6].shape[1]
    assert single == 2 * (128 + 4) and pair == 2 * (2 * 128 + 4)  # two images of 64 px twice as large, two pairs of such
    for part in batch.parts:
        part.data.images = part.data.images.float()
    assert everything.training_pictures(batch) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head": lambda c: DecoupledHead(c, 4, channels=8)}, "task 'detA': the head is made for 4 classes, .* classes=3"),
        ({"criterion": lambda: YOLOXCriterion(2, l1_from_epoch=0)}, "task 'detA': the criterion is made for 2 classes"),
    ],
)
def test_classes_of_head_criterion_and_data_agree(data, change, message):
    first, *rest = ToyExp().tasks
    changed = [replace(first, **change), *rest]
    exp = toy_exp(type("Changed", (ToyExp,), {"tasks": changed}), data_dir=str(data))
    with pytest.raises(UsageError, match=message):
        exp.get_model()


def test_a_head_gets_maps_of_the_strides_that_it_expects(everything, data):
    name, wrong = "ppyoloe", type("Wrong", (ToyExp,), {"tasks": [replace(everything.tasks[1], levels=None)]})
    assert everything.tasks[1].name == name and everything.tasks[1].levels == (2, 1, 0)
    exp = toy_exp(wrong, data_dir=str(data))
    with pytest.raises(UsageError, match=r"task 'ppyoloe': .*strides \(32, 16, 8\), it gets \(8, 16, 32\): say with levels="):
        exp.get_model().train()(first_batch(exp).parts[0])


def test_what_is_missing_of_a_task_is_told_with_its_name(data, tmp_path):
    with pytest.raises(DataError, match="task detA: .*a.* does not exist"):
        toy_exp(data_dir=str(tmp_path)).prepare()


def test_joint_prediction_equals_one_task_after_another(everything):
    model = everything.get_model().eval()
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        together = model.predict(images)
        for task, name in enumerate(model.names):
            alone = model.predict_task(task, images)
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (together[name], alone)), strict=True):
                assert not torch.is_tensor(a) or torch.equal(a, b)
    boxes, scores = TaskView(model, 0).decode(images)
    assert boxes.shape[2] == 4 and scores.shape[2] == 3


def test_each_task_is_a_network_of_its_own(everything):
    """What tools/export.py writes."""
    model = everything.get_model().eval()
    parts = everything.export_parts(model)
    assert [p.name for p in parts] == model.names and parts[0].outputs == ("boxes", "scores")
    with torch.no_grad():
        boxes, scores = parts[0].module(*parts[0].inputs.values())
        assert boxes.shape[:2] == scores.shape[:2] and scores.shape[2] == 3
        assert parts[4].module(*parts[4].inputs.values()).shape == (1, 3)
    everything.set("task", "cls", "test")
    assert [p.name for p in everything.export_parts(model)] == ["cls"]
    everything.set("task", "", "test")


def test_metrics_together_can_be_weighted(data):
    exp = toy_exp(data_dir=str(data), metric_weights={"detA/AP50": 1.0, "cls/top1": 3.0}, best_metric="weighted")
    metrics = exp.get_evaluator(workers=0).evaluate(exp.get_model()).metrics
    assert metrics["weighted"] == pytest.approx((metrics["detA/AP50"] + 3 * metrics["cls/top1"]) / 4)
    alone = toy_exp(data_dir=str(data), task="cls")
    assert set(alone.get_evaluator(workers=0).evaluate(exp.get_model()).metrics) == {"top1"}


# -- MT-09 ------------------------------------------------------------------------------------------------------------------


def linear_run(weights, normalize=True, steps=10, tasks="ab"):
    """Weights after SGD with weight decay on the linear model."""
    specs = [linear_task(name, weight=w) for name, w in zip(tasks, weights, strict=True)]
    model = MultiTaskModel(specs, Same(), Tiny, list, normalize_weights=normalize)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    parallel = MultiTaskParallel(specs)
    network = parallel.wrap(model)
    for step in range(steps):
        parts = [value_batch(t, 0, 1 + step % (t + 2)) for t in range(len(specs))]
        for part, weight in parallel.micro_batches(IterationBatch(parts)):
            (network(part).total * weight).backward()
        parallel.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {n: float(p.detach()) for n, p in model.named_parameters()}


def test_only_the_ratio_of_weights_counts():
    first, doubled = linear_run((2.0, 3.0)), linear_run((4.0, 6.0))
    assert all(abs(first[n] - doubled[n]) < 1e-12 for n in first)
    assert linear_run((2.0, 3.0), normalize=False) != linear_run((4.0, 6.0), normalize=False)


def test_a_task_of_weight_zero_leaves_the_rest_alone():
    joint, alone = linear_run((1.0, 0.0)), linear_run((1.0,), tasks="a")
    assert abs(joint["backbones.0.w"] - alone["backbones.0.w"]) < 1e-12
    value, velocity = 1.0, 0.0
    for _ in range(10):  # nothing but weight decay, through the momentum
        velocity = 0.9 * velocity + 0.1 * value
        value -= 0.01 * velocity
    assert abs(joint["heads.b.h"] - value) < 1e-12 and abs(joint["heads.a.h"] - alone["heads.a.h"]) < 1e-12


# -- MT-11 ------------------------------------------------------------------------------------------------------------------


def test_each_component_moves_at_its_own_rate():
    exp = toy_exp(lr_mult={"backbone": 0.1, "neck": 1.0, "head": 10.0}, momentum=0.0)
    model = exp.get_model().double()
    optimizer = exp.get_optimizer(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    by_name = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    grads = {n: p.grad + by_name[id(p)]["weight_decay"] * p.detach() for n, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        mult = {"b": 0.1, "n": 1.0, "h": 10.0}[name[0]]
        ratio = float((p.detach() - before[name]).norm() / grads[name].norm())
        assert ratio == pytest.approx(exp.learning_rate * mult, rel=1e-7), name


def test_norms_and_biases_do_not_decay_and_groups_are_a_partition():
    exp = toy_exp()
    model = exp.get_model()
    groups = exp.get_optimizer(model).param_groups
    decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            free = isinstance(module, nn.BatchNorm2d) or name.endswith("bias")
            assert decays[id(p)] == (0.0 if free else exp.weight_decay), name
    assert [g["name"] for g in groups][:2] == ["backbone_no_decay", "backbone"] and all("base_lr" in g for g in groups)
    first = groups[1]["params"][0]
    with pytest.raises(UsageError, match="is in 2 parameter groups"):
        check_groups(model, [*groups, {"params": [first]}])
    with pytest.raises(UsageError, match="'backbones.0.stem.0.weight' is in 0 parameter groups"):
        check_groups(model, [{"params": [p for p in g["params"] if p is not first]} for g in groups])


def test_a_head_can_have_its_own_rate():
    class Faster(ToyExp):
        tasks = [detection("detA", "a", 3, lr_mult=3.0), detection("detB", "b", 2), colours(decay_mult=0.0)]

    exp = toy_exp(Faster, lr_mult={"head": 2.0})
    groups = {g["name"]: g for g in exp.get_optimizer(exp.get_model()).param_groups}
    assert groups["head_detA"]["lr"] == pytest.approx(6 * exp.learning_rate)
    assert groups["head"]["lr"] == pytest.approx(2 * exp.learning_rate) and groups["head_cls"]["weight_decay"] == 0


# -- own parameters, frozen norms ---------------------------------------------------------------------------------------------


def test_a_task_can_have_parts_of_a_shared_backbone_to_itself(data):
    class Own(ToyExp):
        tasks = [detection("detA", "a", 3), colours(own_parameters=("backbone.downs.2.*", "backbone.stem.0.weight"))]

    exp = toy_exp(Own, data_dir=str(data))
    model = exp.get_model()
    parallel = exp.get_parallel()
    network = parallel.wrap(model.train())
    assert sum(n.startswith("own.cls.") for n, _ in model.named_parameters()) == 4
    (part,) = [p for p, _ in parallel.micro_batches(first_batch(exp)) if p.task == 1]
    network(part).total.backward()
    assert model.backbones["0"].stem[0].weight.grad is None and model.own["cls"][0].grad.abs().sum() > 0
    assert model.backbones["0"].downs[0][0].weight.grad is not None and "task/cls" in parallel.clip(model)
    with pytest.raises(UsageError, match="own_parameters=.*match nothing"):
        toy_exp(Own, data_dir=str(data)).get_model().__class__([colours(own_parameters=("trunk.*",))], Same(), Backbone, Neck)


def test_frozen_norms_keep_their_statistics(data):
    exp = toy_exp(data_dir=str(data), norms={"backbone": "frozen"})
    model = exp.get_model().train()
    parallel = exp.get_parallel()
    network = parallel.wrap(model)
    before = {n: b.clone() for n, b in model.named_buffers() if n.startswith("backbones")}
    for part, _ in parallel.micro_batches(first_batch(exp)):
        network(part).total.backward()
    parallel.reduce_gradients(model)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers() if n in before)
    assert model.backbones["0"].stem[1].weight.grad is not None and model.heads["detA"].training


def test_components_can_be_frozen_for_the_first_iterations():
    exp = toy_exp(eval_interval=5, freeze_iters=10, frozen_components=("backbone",), lr_schedule="hold_cosine")
    assert [list(exp.frozen(e)) for e in range(4)] == [[r"backbones\."]] * 2 + [[]] * 2
    with pytest.raises(UsageError, match="freeze_iters=7.*multiple of eval_interval"):
        toy_exp(eval_interval=5, freeze_iters=7)


# -- MT-20 ------------------------------------------------------------------------------------------------------------------


def test_a_part_of_a_file_can_be_taken(data):
    """The head of detA alone, from the file of one detector."""
    exp = toy_exp()
    single = {f"head.{n}": torch.full_like(v, 7) for n, v in exp.get_model().heads["detA"].state_dict().items()}
    single |= {f"backbone.{n}": torch.full_like(v, 7) for n, v in Backbone().state_dict().items()}
    model = exp.get_model()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    options = LoadOptions(load_map=(r"^head\.=heads.detA.",), ignore=(r"^backbone",))
    report = exp.load_pretrained(model, single, options)
    wanted = [n for n in before if n.startswith("heads.detA.")]
    assert report.loaded == wanted and not report.unexpected and not report.reinitialized
    assert all(n.startswith("backbone") for n in report.ignored)
    for name, value in model.state_dict().items():
        assert bool((value == 7).all()) if name in wanted else torch.equal(value, before[name])


def test_a_detectors_file_fills_backbone_and_neck(data):
    exp = toy_exp()
    model, source = exp.get_model(), exp.get_model()
    state = {f"backbone.{n}": v for n, v in source.backbones["0"].state_dict().items()}
    state |= {f"neck.{n}": v for n, v in source.necks["0"].state_dict().items()}
    state["head.odd.weight"] = torch.zeros(3)
    report = load_pretrained(model, state, options=LoadOptions(ignore=("^heads",)))
    assert "layout: a model of one task" in report.notes and report.unexpected == ["head.odd.weight"]
    assert all(n.split(".")[0] in ("backbones", "necks") for n in report.loaded)
    assert torch.equal(model.backbones["0"].stem[0].weight, source.backbones["0"].stem[0].weight)
    bare = dict(source.backbones["0"].state_dict())
    assert len(exp.load_backbone(exp.get_model(), bare).loaded) == len([n for n in bare if "batches" not in n]) + 4


def test_a_wrong_shape_is_listed_and_nothing_matched_is_refused():
    exp = toy_exp()
    model = exp.get_model()
    state = model.state_dict()
    state["heads.cls.linear.weight"] = torch.zeros(9, 8)
    report = exp.load_pretrained(model, state)
    assert (
        report.reinitialized == ["heads.cls.linear.weight"]
        and "file (9, 8), model (3, 8)" in report.details[report.reinitialized[0]]
    )
    with pytest.raises(CheckpointError, match="matched 0 of 1"):
        exp.load_pretrained(model, {"other": torch.zeros(2)}, LoadOptions(ignore=("^heads",)))


# -- MT-23, MT-24 --------------------------------------------------------------------------------------------------------------


def labelled(labels, start=0):
    images = torch.arange(start, start + len(labels)).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2).to(torch.uint8)
    meta = [ImageMeta((2, 2), (2, 2), i) for i in range(start, start + len(labels))]
    return LabelledBatch(images, torch.tensor(labels), meta, list(range(len(labels))))


def test_pairs_lie_one_half_after_the_other(data):
    batch = pair_up(labelled([1, 0, 1]), labelled([1, 0, 1], start=10))
    assert len(batch) == 6 and batch.labels.tolist() == [1, 0, 1, 1, 0, 1]
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11, 12] and batch.image_ids == [0, 1, 2, 10, 11, 12]

    class Pairs(ToyExp):
        tasks = [pairs()]

    exp = toy_exp(Pairs, data_dir=str(data), best_metric="top1")
    (part,) = first_batch(exp).parts
    assert part.data.images.shape == (4, 3, 64, 64) and part.data.labels[:2].tolist() == part.data.labels[2:].tolist()
    out = exp.get_model().train()(part)
    assert set(out.losses) == {"same/loss_pair"} and "top1/same" in out.stats


def test_pair_loss_compares_first_with_second():
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    out = PairLogistic(scale=20.0)(embeddings, pair_up(labelled([1, 0]), labelled([1, 0])))
    assert float(out.losses["loss_pair"].detach()) < 1e-6 and float(out.stats["top1"]) == 100.0
    wrong = PairLogistic(scale=20.0)(embeddings, pair_up(labelled([0, 0]), labelled([0, 0])))
    assert float(wrong.stats["top1"]) == 50.0 and float(wrong.losses["loss_pair"].detach()) == pytest.approx(10.0, abs=1e-4)


def test_top1_by_hand():
    logits = torch.tensor([[2.0, 1, 0], [0, 3, 1], [0, 1, 5], [9, 1, 0]])
    assert float(top1(logits, torch.tensor([0, 1, 2, 2]))) == 75.0
    assert float(CrossEntropy()(logits, labelled([0, 1, 2, 2])).stats["top1"]) == 75.0
    answers = torch.tensor([[1.0, 0], [1, 1]])
    assert float(multilabel_top1(torch.tensor([[2.0, -1], [-1, 4]]), answers)) == 75.0
    batch = replace(labelled([0, 0]), labels=answers)
    assert float(BinaryCrossEntropy()(torch.tensor([[2.0, -1], [-1, 4]]), batch).stats["top1"]) == 75.0
    with pytest.raises(UsageError, match=r"labels \[3\] in the batch, but the head has 3 classes"):
        CrossEntropy()(logits, labelled([0, 1, 2, 3]))


# -- values of fields --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"eval_interval": 7}, "eval_interval=7.*a divisor of max_iter=20"),
        ({"clip": {"spine": 1.0}}, "clip=.*of backbone, neck, head"),
        ({"clip": {"backbone": 1.0}, "clip_mode": "global"}, "clip_mode=global takes clip_norm"),
        ({"clip_norm": 3.0}, "say clip_mode=global"),
        ({"norms": {"backbone": "loud"}}, "local, frozen or sync"),
        ({"best_metric": "AP"}, "best_metric='AP'.*AP_mean"),
        ({"metric_weights": {"AP51": 1.0}}, "metric_weights"),
        ({"task": "detC"}, "task 'detC': expected one of detA, detB, cls"),
        ({"alert_url": "file:///etc/passwd"}, "alert_url"),
        ({"grad_accum": 2}, "give the tasks more shards"),
        ({"input_size": (100, 100)}, "multiples of 32"),
        ({"lr_steps": (5,)}, "lr_mults"),
    ],
)
def test_values_that_cannot_work_stop_at_the_start(fields, message):
    with pytest.raises(UsageError, match=message):
        toy_exp(**fields)


def test_epochs_and_batch_follow_from_the_tasks():
    exp = toy_exp(max_iter=30, eval_interval=10, save_interval=5)
    assert (exp.max_epoch, exp.batch_size, exp.save_interval_steps) == (3, 8, 5)
    exp = ToyExp()
    exp.set("max_epoch", 5, "command line")
    with pytest.raises(UsageError, match="max_epoch=5.*give max_iter"):
        exp.validate()
    exp = ToyExp()
    exp.set("batch_size", 5, "command line")
    with pytest.raises(UsageError, match="batch_size=5.*sum over the tasks"):
        exp.validate()


@pytest.mark.parametrize("curve", ["step", "cosine", "linear", "hold_cosine", "dual_cosine", "warmup_cosine", "warmup_poly"])
def test_schedules_are_factors_and_know_the_iteration_alone(curve):
    """MT-12, the last part: a resume at any iteration gets the same rate, since nothing but the iteration counts."""
    exp = toy_exp(lr_schedule=curve, warmup_iters=4, lr_steps=(10,), lr_mults=(0.1,), lr_end=0.01, eval_interval=5)
    first, again = exp.get_lr_schedule(5), exp.get_lr_schedule(5)
    assert (
        all(0 <= first(i) <= 1 for i in range(40))
        and [first(i) for i in range(20)] == [again(i) for i in reversed(range(20))][::-1]
    )


def test_batches_do_not_depend_on_the_number_of_processes_or_where_one_starts(data):
    exp = toy_exp(data_dir=str(data))
    whole = exp.get_train_loader(0, 0, 1)
    for world in (2, 3, 4):
        units = [u for r in range(world) for u in exp.get_train_loader(0, r, world).units]
        keys = [k for r in range(world) for k in next(exp.get_train_loader(0, r, world)._keys(6)).keys]
        assert units == whole.units and keys == list(next(whole._keys(6)).keys)
    other = exp.get_train_loader(0, 0, 1, data_seed=1)
    assert next(other._keys(6)).keys != next(whole._keys(6)).keys
    with_workers = exp.get_train_loader(2, 0, 1)
    streams = whole.batches(0), with_workers.batches(3)
    for _ in range(3):
        next(streams[0])
    for a, b in zip(next(streams[0]).parts, next(streams[1]).parts, strict=True):
        assert torch.equal(a.data.images, b.data.images) and isinstance(a, TaskBatch) and a.step == b.step == 3
    with_workers.close()
