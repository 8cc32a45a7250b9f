"""Judges a checkpoint, or a file of detections, on a data set: ``python tools/eval.py -c RUN/best.pth``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # works from any folder, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loguru import logger
from torch import nn

from mmdet.core.checkpoint import LoadOptions, is_trained_here, read_checkpoint
from mmdet.core.cli import Parser, add_exp_arguments, exp_from_arguments, exp_source, run_command
from mmdet.core.distributed import get_rank, get_world_size, is_main
from mmdet.core.launch import choose_device, describe_device, init_process_group, relaunch, script_path, usable_amp
from mmdet.core.trained import load_trained
from mmdet.core.trainer import seed_everything
from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.demo import make_demo
from mmdet.data.errors import DataError
from mmdet.errors import UsageError
from mmdet.evaluators import Evaluation, Results, format_per_class, format_summary, judge_results
from mmdet.exp import Exp, exp_of_checkpoint
from mmdet.models.repvgg import deploy

COMMAND_LINE = "command line"


def make_parser() -> Parser:
    parser = Parser(
        prog="eval.py",
        description="Judge a checkpoint on a split of a data set, or (--detections) a COCO results file.",
    )
    add_exp_arguments(parser)
    parser.add_argument("-c", "--ckpt", default="", help="checkpoint; it knows its exp, so -f is needed for published files only")
    parser.add_argument(
        "-b", "--batch-size", type=int, default=8, help="images per step and process; the AP does not depend on it"
    )
    parser.add_argument("-d", "--devices", type=int, default=1, help="processes, one per device")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--amp", default="off", choices=["off", "bf16", "fp16"], help="precision; off is float32")
    parser.add_argument("--raw", action="store_true", help="the raw weights, not their moving average (EMA)")
    parser.add_argument(
        "--deploy", action="store_true", help="fold norms and re-parameterise first (the checkpoint stays as it is)"
    )
    parser.add_argument(
        "--trust-checkpoint", action="store_true", help="read files that hold more than tensors: can run code in them"
    )
    parser.add_argument("--data", default="", help="folder in the exp's format (COCO's), or 'demo'; default: the checkpoint's")
    parser.add_argument("--split", default="val", metavar="val|test|NAME", help="such as annotations/instances_NAME*.json")
    parser.add_argument("--task", default="", metavar="NAME", help="of an exp with several tasks, judge this one alone")
    parser.add_argument("--json", default="", metavar="FILE", help="write metrics and per_class there")
    parser.add_argument("--save-detections", default="", metavar="FILE", help="write COCO's results file there")
    parser.add_argument("--save-tracks", default="", metavar="DIR", help="write a tracker's boxes there, in its toolkits' forms")
    parser.add_argument("--detections", default="", metavar="FILE", help="judge this COCO results file; needs --data, no model")
    parser.add_argument("--conf", type=float, help="score below which detections are dropped")
    parser.add_argument("--nms", type=float, help="IoU above which the weaker box of a class is dropped")
    parser.add_argument("--max-dets", type=int, help="detections per image and class that count; default 100")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data")
    return parser


def run(argv: list[str]) -> int:
    args = make_parser().parse_intermixed_args(argv)
    check_arguments(args)
    if args.detections:
        evaluation, about = judge_file(args)
        show(evaluation)
    else:
        content = read_checkpoint(args.ckpt, args.trust_checkpoint) if args.ckpt else None
        exp = build_exp(args, content)
        code = relaunch(args.devices, script_path(), argv)
        if code is not None:
            return code
        evaluation, about = judge_model(args, exp, content)
        for line in exp.evaluation_lines(evaluation):
            say(line)
    if is_main() and args.json:
        write_json(Path(args.json), evaluation, about)
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Stops before anything is read or written when the flags cannot work together."""
    for flag, value, least in (("-b", args.batch_size, 1), ("-d", args.devices, 1), ("--workers", args.workers, 0)):
        if value < least:
            raise UsageError(f"{flag} {value}: expected at least {least}")
    if args.max_dets is not None and args.max_dets < 1:
        raise UsageError(f"--max-dets {args.max_dets}: expected at least 1")
    for flag, path in (("--json", args.json), ("--save-detections", args.save_detections)):
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: the folder {str(Path(path).parent)!r} does not exist")
        if path and Path(path).is_dir():
            raise UsageError(f"{flag} {path}: this is a folder; expected the name of a file")
    if args.raw and not args.ckpt:
        raise UsageError("--raw chooses between the weights of a checkpoint: give one with -c")
    if args.detections:
        check_detections_arguments(args)


def check_detections_arguments(args: argparse.Namespace) -> None:
    of_a_model = {
        "-c": args.ckpt,
        "-f/-n": exp_source(args),
        "--conf": args.conf is not None,
        "--nms": args.nms is not None,
        "--amp": args.amp != "off",
        "--save-detections": args.save_detections,
        "--save-tracks": args.save_tracks,
        "--task": args.task,
        "--deploy": args.deploy,
        "-d": args.devices > 1,
        " ".join(args.overrides): args.overrides,
    }
    given = [flag for flag, value in of_a_model.items() if value]
    if given:
        raise UsageError(f"--detections judges a file without a model: leave out {', '.join(given)}")
    if not args.data:
        raise UsageError("--detections needs the data set that the file belongs to: --data DIR")


# -- a results file -----------------------------------------------------------------------------------------------------------


def judge_file(args: argparse.Namespace) -> tuple[Evaluation, dict[str, Any]]:
    results = Results.load(args.detections)
    folder = make_demo(Path("outputs") / "demo_data") if args.data == "demo" else Path(args.data)
    source = CocoDataset(*find_coco(folder, args.split))
    logger.info(source.report())
    say(f"judging {len(results)} detections of {args.detections} on {source.annotation_file}")
    evaluation = judge_results(source, results, args.max_dets or 100)
    return evaluation, {"detections": args.detections, "annotations": str(source.annotation_file), "images": len(source)}


# -- a model ------------------------------------------------------------------------------------------------------------------


def build_exp(args: argparse.Namespace, content: Mapping[str, Any] | None) -> Exp:
    """The exp of the checkpoint, or the one that -f or -n names, with what flags and words say."""
    source = exp_source(args)
    if content is not None and (is_trained_here(content) or not source):
        exp = exp_of_checkpoint(content, source or None)
    else:
        exp = exp_from_arguments(args)
    flags = {
        "--data": ("data_dir", args.data or None),
        "--conf": ("score_threshold", args.conf),
        "--nms": ("nms_threshold", args.nms),
        "--max-dets": ("max_dets", args.max_dets),
        "--task": ("task", args.task or None),
    }
    for flag, (name, value) in flags.items():
        if value is not None:
            if name not in exp.field_names():
                raise UsageError(f"{flag} {value}: {exp.exp_name} has no {name}, so leave it out")
            exp.set(name, value, COMMAND_LINE)
    exp.override(args.overrides)
    if args.max_dets is not None and exp.keep_top_k < args.max_dets and exp.origin("keep_top_k") != COMMAND_LINE:
        exp.set("keep_top_k", args.max_dets, "--max-dets")
        logger.info(f"keep_top_k={args.max_dets}, so that --max-dets has an effect")
    exp.validate()
    return exp


def judge_model(args: argparse.Namespace, exp: Exp, content: Mapping[str, Any] | None) -> tuple[Evaluation, dict[str, Any]]:
    device = choose_device(args.device)
    init_process_group(device)
    amp = usable_amp(args.amp, device)
    if content is None:  # no classes to be right or wrong about: those of the data
        exp.adopt_data(args.split)
    seed_everything(exp.seed, 0, 0)  # fresh weights, where there are any, are the same on all ranks
    model = exp.get_model()
    weights, step = load_weights(args, exp, model, content)
    if args.deploy:
        model, weights = deploy(model), f"deployed {weights}"
    evaluator = exp.get_evaluator(
        split=args.split,
        batch_size=args.batch_size,
        workers=args.workers,
        rank=get_rank(),
        world=get_world_size(),
        device=device,
        amp=amp,
    )
    if evaluator is None:
        raise DataError(f"split {args.split!r} of {args.data or 'the data set'} is empty: there is nothing to judge")
    for flag, path, attribute in (
        ("--save-detections", args.save_detections, "results"),
        ("--save-tracks", args.save_tracks, "save_tracks"),
    ):
        if path and not hasattr(evaluator, attribute):
            raise UsageError(f"{flag} {path}: the evaluation of {exp.exp_name} gives none, so leave it out")
    precision = "float32" if amp == "off" else amp
    at_step = "" if step is None else f" of step {step}"
    named = f" of {args.ckpt}" if args.ckpt else ""
    report, judged = exp.judged(evaluator)
    amount = ", ".join(f"{count} {what}" for what, count in judged.items() if isinstance(count, int))
    logger.info(report)
    say(f"judging the {weights} weights{at_step}{named} in {precision} on {describe_device(device)}: {amount}")
    model.to(device)
    if exp.channels_last:  # as in training: another memory format rounds otherwise
        model.to(memory_format=torch.channels_last)
    evaluation = evaluator.evaluate(model)
    if args.save_detections and is_main():
        evaluator.results.save(args.save_detections)
        logger.info(f"{len(evaluator.results)} detections written to {args.save_detections}")
    if args.save_tracks and is_main():
        evaluator.save_tracks(args.save_tracks, exp.exp_name)
        logger.info(f"{len(evaluator.tracks)} tracks written to {args.save_tracks}")
    about = {"checkpoint": args.ckpt or None, "weights": weights, "step": step, "precision": precision, "exp": exp.exp_name}
    return evaluation, {**about, **judged}


def load_weights(
    args: argparse.Namespace, exp: Exp, model: nn.Module, content: Mapping[str, Any] | None
) -> tuple[str, int | None]:
    """Loads the checkpoint into ``model``; returns the kind of the weights and the training step, where the file tells it.

    Raises:
        CheckpointError: the file lacks tensors of the model, or has no raw weights although they were asked for.
    """
    if content is None:
        logger.warning("no checkpoint given (-c): judging freshly initialised weights, which know nothing")
        return "freshly initialised", None
    options = LoadOptions(raw=args.raw, trust=args.trust_checkpoint)
    return load_trained(exp, model, args.ckpt, content, options)


# -- output -------------------------------------------------------------------------------------------------------------------


def show(evaluation: Evaluation) -> None:
    if evaluation.per_class:
        say(f"\n{format_per_class(evaluation)}")
    say(f"\n{format_summary(evaluation)}")


def say(text: str) -> None:
    """On standard output, of rank 0; a character that the terminal cannot show is escaped."""
    if is_main():
        sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def write_json(path: Path, evaluation: Evaluation, about: dict[str, Any]) -> None:
    """``metrics``, ``per_class`` and ``about`` (what was judged); what is undefined is null."""
    content = {"metrics": evaluation.metrics, "per_class": evaluation.per_class, "about": about}
    path.write_text(json.dumps(without_nan(content), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    logger.info(f"metrics written to {path}")


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> int:
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
