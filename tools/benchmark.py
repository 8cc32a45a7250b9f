"""Speed: ``python tools/benchmark.py step|data|judge|track|pairs``. Machines are noisy: compare ratios of one call, not calls.

step: seconds of a training step (forward, loss, backward, optimizer, EMA) of an exp. data: training samples a second of one
process. judge: the COCO judge on 5,000 images and 500,000 detections, beside pycocotools. track: frames a second of a tracker.
pairs: a tracker's training pairs a second of one process, and the part of a training step that waits for two workers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from mmdet.core.launch import choose_device
from mmdet.data.structures import Batch, Targets
from mmdet.evaluators import Results, judge
from mmdet.exp import get_exp
from mmdet.models.repvgg import deploy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "data", "judge", "track", "pairs"])
    parser.add_argument(
        "-n", "--name", default="", help="shipped exp, or an exp file; default: ppyoloe_s, of trackers siamese_tiny"
    )
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=320, help="px of the square input")
    parser.add_argument("--boxes", type=int, nargs="+", default=[10, 200], help="boxes per image")
    parser.add_argument("--data", default="demo", help="COCO-format folder for 'data', folder of videos for 'track' and 'pairs'")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    args.name = args.name or ("siamese_tiny" if args.what in ("track", "pairs") else "ppyoloe_s")
    work = {"step": time_steps, "data": time_data, "judge": time_judge, "track": time_track, "pairs": time_pairs}
    work[args.what](args)
    return 0


def time_steps(args: argparse.Namespace) -> None:
    """Each combination in turn, interleaved, so that a busy moment of the machine hits all of them."""
    device = choose_device(args.device)
    cases: dict[str, Callable[[], None]] = {}
    for boxes in args.boxes:
        for channels_last in (False, True):
            label = f"{args.name} {'channels_last' if channels_last else 'contiguous'}, {boxes} boxes"
            cases[label] = training_step(args, device, boxes, channels_last)
    report({label: [seconds(step, device) for _ in range(1)] for label, step in cases.items()}, "warm-up")
    times: dict[str, list[float]] = {label: [] for label in cases}
    for _ in range(args.steps):
        for label, step in cases.items():
            times[label].append(seconds(step, device))
    report(times, f"{device}, {torch.get_num_threads()} threads, batch {args.batch_size}, {args.size} px")


def training_step(args: argparse.Namespace, device: torch.device, boxes: int, channels_last: bool) -> Callable[[], None]:
    exp = get_exp(args.name, [f"batch_size={args.batch_size}", f"input_size={args.size}"])
    torch.manual_seed(0)
    model = exp.get_model().to(device).train()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer, ema = exp.get_optimizer(model), exp.get_ema()
    if ema is not None:
        ema.attach(model)
    corners = torch.rand(args.batch_size, boxes, 2, 2).mul(args.size).sort(dim=2).values.flatten(2)
    labels = torch.randint(0, exp.num_classes, (args.batch_size, boxes))
    images = torch.randint(0, 256, (args.batch_size, 3, args.size, args.size), dtype=torch.uint8)
    batch = Batch(images, Targets.from_lists(list(corners), list(labels)), epoch=exp.max_epoch - 1).to(device)

    def step() -> None:
        model(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema is not None:
            ema.update(model)

    for group in optimizer.param_groups:
        group["lr"] = 1e-6  # the weights must stay sane whatever the random boxes
    return step


def time_data(args: argparse.Namespace) -> None:
    exp = get_exp(args.name, [f"batch_size={args.batch_size}", f"data_dir={args.data}", f"input_size={args.size}"])
    torch.set_num_threads(1)
    exp.prepare()
    batches = exp.get_train_loader(workers=0).batches(0)
    next(batches)
    rates = []
    for _ in range(args.steps):
        start = time.perf_counter()
        images = len(next(batches))
        rates.append(images / (time.perf_counter() - start))
    sides = [height for height, _ in exp.train_sizes()]
    say(f"{args.name} on {args.data}, {sides[0]}-{sides[-1]} px: {statistics.median(rates):.1f} images/s")


def time_judge(args: argparse.Namespace) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    draw = np.random.default_rng(0)
    truth, results = random_judgement(draw, images=5000, per_image=100, classes=80)
    start = time.perf_counter()
    ours = judge(truth, results).metrics["AP"]
    middle = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO()
        reference.dataset = truth
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(results.to_coco()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    end = time.perf_counter()
    say(f"judge {middle - start:.1f} s, pycocotools {end - middle:.1f} s; AP differs by {abs(ours - evaluation.stats[0]):.1e}")


def random_judgement(draw: np.random.Generator, images: int, per_image: int, classes: int) -> tuple[dict, Results]:
    """Ground truth of 7 boxes an image, and detections some of which lie near it."""
    boxes = np.concatenate([draw.uniform(0, 500, (images, 7, 2)), draw.uniform(10, 140, (images, 7, 2))], axis=2)
    labels = draw.integers(1, classes + 1, (images, 7))
    near = np.repeat(boxes, -(-per_image // 7), axis=1)[:, :per_image] + draw.normal(0, 8, (images, per_image, 4))
    near[..., 2:] = np.maximum(near[..., 2:], 1)
    found = np.where(draw.random((images, per_image)) < 0.5, np.repeat(labels, -(-per_image // 7), axis=1)[:, :per_image], 1)
    truth = {
        "info": {},
        "images": [{"id": i + 1, "width": 640, "height": 640, "file_name": ""} for i in range(images)],
        "categories": [{"id": c + 1, "name": str(c)} for c in range(classes)],
        "annotations": [
            {"id": i * 7 + k + 1, "image_id": i + 1, "category_id": int(labels[i, k]), "bbox": boxes[i, k].tolist()}
            | {"area": float(boxes[i, k, 2] * boxes[i, k, 3]), "iscrowd": 0}
            for i in range(images)
            for k in range(7)
        ],
    }
    ids = np.repeat(np.arange(1, images + 1), per_image)
    return truth, Results(ids, found.reshape(-1), near.reshape(-1, 4), draw.random(images * per_image))


def time_track(args: argparse.Namespace) -> None:
    """Five passes over the first video of the val split, both forms of the model in turn; reading the frames does not count."""
    device = choose_device(args.device)
    torch.set_num_threads(1)
    exp = get_exp(args.name, [f"data_dir={args.data}"])
    source = exp.sources("val")[0]
    frames = [source.load(0, i) for i in range(min(len(source.video(0)), 100))]
    torch.manual_seed(0)
    model = exp.get_model().to(device).eval()
    trackers = {"training form": exp.get_tracker(model, device), "deployed": exp.get_tracker(deploy(model).eval(), device)}
    rates: dict[str, list[float]] = {label: [] for label in trackers}
    for _ in range(6):
        for label, tracker in trackers.items():
            state = tracker.start(frames[0], source.video(0).boxes[0])
            start = time.perf_counter()
            for frame in frames[1:]:
                state = tracker.follow(state, frame)
            rates[label].append((len(frames) - 1) / (time.perf_counter() - start))
    for label, values in rates.items():  # the first pass warmed up
        say(f"{args.name}, {label}, {device}, 1 thread: {statistics.median(values[1:]):.1f} frames/s (median of 5)")


def time_pairs(args: argparse.Namespace) -> None:
    """Pairs a second without workers; then training steps on what two workers make."""
    device = choose_device(args.device)
    torch.set_num_threads(1)
    exp = get_exp(args.name, [f"data_dir={args.data}", f"batch_size={args.batch_size}"])
    exp.prepare()
    batches, rates = exp.get_train_loader(workers=0).batches(0), []
    for _ in range(args.steps + 1):
        start = time.perf_counter()
        rates.append(len(next(batches)) / (time.perf_counter() - start))
    say(f"{args.name}: {statistics.median(rates[1:]):.0f} pairs/s of one process")
    model = exp.get_model().to(device).train()
    optimizer, loader = exp.get_optimizer(model), exp.get_train_loader(workers=2)
    stream, waits, wholes = exp.get_prefetcher(loader.batches(0), device), [], []
    for _ in range(4 * args.steps + 1):
        start = time.perf_counter()
        batch = next(stream)
        waits.append(time.perf_counter() - start)
        model(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wholes.append(time.perf_counter() - start)
    loader.close()
    share = sum(waits[1:]) / sum(wholes[1:])
    middle = statistics.median(wholes[1:])
    say(f"batch {args.batch_size}, 2 workers, {device}: {100 * share:.1f} % of a step of {middle:.3f} s waits for data")


def seconds(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def report(times: dict[str, list[float]], title: str) -> None:
    say(title)
    first = statistics.median(next(iter(times.values())))
    for label, values in times.items():
        middle = statistics.median(values)
        say(f"  {label:<45} {middle:.3f} s  ({middle / first:.2f} of the first)")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
