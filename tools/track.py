"""Follows one target through a video: ``python tools/track.py VIDEO|FOLDER --init x,y,w,h -c RUN/best.pth --save out.mp4``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # works from any folder, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cv2
import numpy as np
import torch
from loguru import logger

from mmdet.core.checkpoint import LoadOptions, is_trained_here, read_checkpoint
from mmdet.core.cli import Parser, add_exp_arguments, exp_from_arguments, exp_source, run_command
from mmdet.core.launch import choose_device, describe_device
from mmdet.core.trained import load_trained
from mmdet.data.frames import FrameReader, VideoFile
from mmdet.errors import UsageError
from mmdet.exp import Exp, exp_of_checkpoint
from mmdet.models.repvgg import deploy

GREEN = (40, 220, 60)


def make_parser() -> Parser:
    parser = Parser(prog="track.py", description="Follow one target through a video file or a folder of frames.")
    parser.add_argument("video", metavar="VIDEO|FOLDER", help="video file, or folder of images in the order of their names")
    add_exp_arguments(parser)
    parser.add_argument("-c", "--ckpt", required=True, help="checkpoint of a tracker; it knows its exp")
    parser.add_argument(
        "--init", default="", metavar="X,Y,W,H", help="the target in the first frame, px: left, top, width, height"
    )
    parser.add_argument("--select", action="store_true", help="draw the target with the mouse in a window instead")
    parser.add_argument("--save", default="", metavar="FILE", help="write the video with the box drawn there (.mp4, .avi)")
    parser.add_argument("--json", default="", metavar="FILE", help="write each frame's box and score there")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--raw", action="store_true", help="the raw weights, not their moving average (EMA)")
    parser.add_argument("--no-deploy", action="store_true", help="keep the training form of re-parameterised blocks (slower)")
    parser.add_argument(
        "--trust-checkpoint", action="store_true", help="read files that hold more than tensors: can run code in them"
    )
    return parser


def run(argv: list[str]) -> int:
    args = make_parser().parse_intermixed_args(join_init(argv))
    check_arguments(args)
    frames = FrameReader(args.video)
    first = next(iter(frames))
    box = chosen_box(args, first)
    tracker, about = build_tracker(args)
    boxes, scores = follow(tracker, frames, box, VideoFile(args.save, frames.fps) if args.save else None)
    if args.save:
        logger.info(f"video written to {args.save}")
    if args.json:
        write_json(Path(args.json), boxes, scores, {"video": str(args.video), "size": list(first.shape[1::-1]), **about})
    return 0


def join_init(argv: list[str]) -> list[str]:
    """``--init -5,10,40,60`` as one word: argparse would take a box that begins left of the frame for a flag."""
    words = list(argv)
    for i in range(len(words) - 1, 0, -1):
        if words[i - 1] == "--init" and re.match(r"-[\d.]", words[i]):
            words[i - 1 : i + 1] = [f"--init={words[i]}"]
    return words


def check_arguments(args: argparse.Namespace) -> None:
    """Stops before anything is read or written when the flags cannot work together."""
    if bool(args.init) == args.select:
        raise UsageError("say where the target is in the first frame: with --init X,Y,W,H, or with --select in a window")
    for flag, path in (("--save", args.save), ("--json", args.json)):
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: the folder {str(Path(path).parent)!r} does not exist")
        if path and Path(path).is_dir():
            raise UsageError(f"{flag} {path}: this is a folder; expected the name of a file")
    if args.save and Path(args.save).suffix.lower() not in VideoFile.CODECS:
        raise UsageError(f"--save {args.save}: expected a file that ends in {' or '.join(VideoFile.CODECS)}")
    if args.save and Path(args.save).absolute() == Path(args.video).absolute():
        raise UsageError(f"--save {args.save} would overwrite the video that is read")


def chosen_box(args: argparse.Namespace, image: np.ndarray) -> np.ndarray:
    """(4,) xyxy px of the target in the first frame."""
    x, y, width, height = select(image) if args.select else parse_init(args.init)
    if not (width > 0 and height > 0 and x < image.shape[1] and y < image.shape[0] and x + width > 0 and y + height > 0):
        raise UsageError(
            f"--init {x:g},{y:g},{width:g},{height:g}: this box has no area inside the first frame of "
            f"{image.shape[1]}x{image.shape[0]} px (x,y is its left top corner, then width and height)"
        )
    return np.array([x, y, x + width, y + height], np.float64)


def parse_init(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 4 or not np.isfinite(values).all():
        raise UsageError(f"--init {text}: expected four numbers X,Y,W,H in px, such as 120,80,40,60")
    return values


def select(image: np.ndarray) -> list[float]:
    """x, y, width, height drawn with the mouse."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UsageError("--select opens a window, and there is no screen here: give the box with --init X,Y,W,H")
    title = "draw the target, then press ENTER"
    try:
        box = cv2.selectROI(title, image[..., ::-1], showCrosshair=False)
        cv2.destroyWindow(title)
    except cv2.error as error:
        raise UsageError(f"--select: OpenCV cannot open a window here ({error.err}): give the box with --init X,Y,W,H") from error
    if not any(box[2:]):
        raise UsageError("--select: no box was drawn")
    return [float(value) for value in box]


def build_tracker(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The tracker of a checkpoint, and what is to be recorded about it."""
    content = read_checkpoint(args.ckpt, args.trust_checkpoint)
    exp = build_exp(args, content)
    device = choose_device(args.device)
    model = exp.get_model()
    weights, step = load_trained(exp, model, args.ckpt, content, LoadOptions(raw=args.raw, trust=args.trust_checkpoint))
    model.eval()
    if not args.no_deploy:
        model, weights = deploy(model), f"deployed {weights}"
    logger.info(f"tracking with the {weights} weights{'' if step is None else f' of step {step}'} on {describe_device(device)}")
    about = {"checkpoint": args.ckpt, "weights": weights, "step": step, "exp": exp.exp_name}
    model.to(device)
    if exp.channels_last:
        model.to(memory_format=torch.channels_last)
    return exp.get_tracker(model.eval(), device), about


def build_exp(args: argparse.Namespace, content: Mapping[str, Any]) -> Exp:
    source = exp_source(args)
    exp = exp_of_checkpoint(content, source or None) if is_trained_here(content) or not source else exp_from_arguments(args)
    if not hasattr(exp, "get_tracker"):
        given = f"-f {source}" if source else f"-c {args.ckpt}"
        raise UsageError(f"{given}: {exp.exp_name} is no tracker; expected a checkpoint of one, such as siamese_tiny's")
    exp.override(args.overrides)
    exp.validate()
    return exp


def follow(tracker: Any, frames: FrameReader, box: np.ndarray, video: VideoFile | None) -> tuple[np.ndarray, np.ndarray]:
    """Boxes (F, 4) xyxy px and scores (F,) of all frames; the first is what was given."""
    boxes, scores, seconds, state, size = [], [], 0.0, None, None
    try:
        for image in frames:
            begin = time.perf_counter()
            state = tracker.start(image, box) if state is None else tracker.follow(state, image)
            seconds += time.perf_counter() - begin
            boxes.append(state.box)
            scores.append(state.score)
            if video is not None:
                size = size or image.shape
                check_size(image, size, len(boxes), frames)
                video.add(drawn(image, state))
    finally:
        if video is not None:
            video.close()
    logger.info(
        f"{len(boxes)} frames of {frames.path}, {len(boxes) / max(seconds, 1e-9):.1f} frames/s without reading and drawing"
    )
    return np.array(boxes), np.array(scores)


def check_size(image: np.ndarray, size: tuple[int, ...], number: int, frames: FrameReader) -> None:
    if image.shape != size:
        raise UsageError(
            f"--save: frame {number} of {frames.path} has {image.shape[1]}x{image.shape[0]} px, those before it "
            f"{size[1]}x{size[0]}: a video has one size; leave out --save, --json takes any frames"
        )


def drawn(image: np.ndarray, state: Any) -> np.ndarray:
    """A copy of the frame with the box and its score."""
    canvas = image.copy()
    thickness = max(round(min(image.shape[:2]) / 200), 1)
    x1, y1, x2, y2 = np.rint(state.box).astype(int).tolist()
    cv2.rectangle(canvas, (x1, y1), (x2 - 1, y2 - 1), GREEN, thickness)
    scale = max(min(image.shape[:2]) / 600, 0.35)
    cv2.putText(canvas, f"{state.score:.2f}", (x1, max(y1 - 3, 10)), cv2.FONT_HERSHEY_SIMPLEX, scale, GREEN, 1, cv2.LINE_AA)
    return canvas


def write_json(path: Path, boxes: np.ndarray, scores: np.ndarray, about: Mapping[str, Any]) -> None:
    """``about`` and ``frames``: each frame's ``box_xywh`` (px: left, top, width, height) and ``score``."""
    rows = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).round(4).tolist()
    frames = [{"box_xywh": row, "score": round(float(score), 6)} for row, score in zip(rows, scores, strict=True)]
    path.write_text(json.dumps({**about, "frames": frames}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    logger.info(f"{len(frames)} boxes written to {path}")


def main() -> int:
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
