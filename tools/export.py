"""Writes a trained model's networks as ONNX files: ``python tools/export.py -c RUN/best.pth --output DIR``."""

from __future__ import annotations

import argparse
import importlib.util
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
from mmdet.core.trained import load_trained
from mmdet.errors import UsageError
from mmdet.exp import Exp, exp_of_checkpoint
from mmdet.models.repvgg import deploy

PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # of the extra [export]; the last for the comparison
TOLERANCE = 1e-4  # largest difference, as a part of the largest value, between the file's outputs and the model's


def make_parser() -> Parser:
    parser = Parser(prog="export.py", description="Write the networks of a trained model as ONNX files, deployed and compared.")
    add_exp_arguments(parser)
    parser.add_argument("-c", "--ckpt", required=True, help="checkpoint; it knows its exp")
    parser.add_argument("--output", default="", metavar="DIR", help="folder for the files; default: beside the checkpoint")
    parser.add_argument("--raw", action="store_true", help="the raw weights, not their moving average (EMA)")
    parser.add_argument("--opset", type=int, default=18, help="version of ONNX's operators; at least 18")
    parser.add_argument("--no-check", action="store_true", help="do not run the files to compare them with the model")
    parser.add_argument(
        "--trust-checkpoint", action="store_true", help="read files that hold more than tensors: can run code in them"
    )
    return parser


def run(argv: list[str]) -> int:
    args = make_parser().parse_intermixed_args(argv)
    if args.opset < 18:
        raise UsageError(f"--opset {args.opset}: expected at least 18")
    folder = Path(args.output) if args.output else Path(args.ckpt).parent
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: this is a file; expected a folder")
    exp, model = load_model(args)
    check_packages(PACKAGES[:2] if args.no_check else PACKAGES)
    folder.mkdir(parents=True, exist_ok=True)
    for part in exp.export_parts(deploy(model)):
        path = folder / f"{exp.exp_name}_{part.name}.onnx"
        write(part, path, args.opset)
        shapes = ", ".join(f"{name} {'x'.join(map(str, value.shape))}" for name, value in part.inputs.items())
        difference = "" if args.no_check else f"; differs from the model by {compare(part, path):.1e} of the largest value"
        logger.info(f"{path} written: {shapes} -> {', '.join(part.outputs)}{difference}")
    return 0


def check_packages(names: tuple[str, ...]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"exporting needs the packages {', '.join(missing)}: pip install {' '.join(missing)}")


def load_model(args: argparse.Namespace) -> tuple[Exp, nn.Module]:
    """The exp of the checkpoint, or the one that -f or -n names, and its trained model on the CPU.

    Raises:
        UsageError: the exp does not say which networks make up its model.
        CheckpointError: the file does not hold the whole model.
    """
    content: Mapping[str, Any] = read_checkpoint(args.ckpt, args.trust_checkpoint)
    source = exp_source(args)
    known = is_trained_here(content) or not source
    exp = exp_of_checkpoint(content, source or None) if known else exp_from_arguments(args)
    exp.override(args.overrides)
    exp.validate()
    if not hasattr(exp, "export_parts"):
        raise UsageError(
            f"exp {exp.exp_name!r} does not say which networks make up its model (export_parts): it cannot be exported yet"
        )
    model = exp.get_model()
    weights, step = load_trained(exp, model, args.ckpt, content, LoadOptions(raw=args.raw, trust=args.trust_checkpoint))
    logger.info(f"the {weights} weights{'' if step is None else f' of step {step}'} of {args.ckpt}, deployed")
    return exp, model


def write(part: Any, path: Path, opset: int) -> None:
    """``part``: a network with ``module``, example ``inputs`` by name, and names of the ``outputs``."""
    torch.onnx.export(
        part.module,
        tuple(part.inputs.values()),
        str(path),
        input_names=list(part.inputs),
        output_names=list(part.outputs),
        opset_version=opset,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def compare(part: Any, path: Path) -> float:
    """Largest difference between the file's outputs and the model's on the examples, as a part of the largest value.

    Raises:
        RuntimeError: it is more than rounding explains.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(list(part.outputs), {name: value.numpy() for name, value in part.inputs.items()})
    with torch.no_grad():
        expected = part.module(*part.inputs.values())
    expected = expected if isinstance(expected, tuple) else (expected,)
    pairs = [(torch.from_numpy(f), e) for f, e in zip(found, expected, strict=True)]
    largest = max(float((f - e).abs().max() / e.abs().max().clamp(min=1e-12)) for f, e in pairs)
    if not largest <= TOLERANCE:
        raise RuntimeError(
            f"{path} differs from the model by {largest:.1e} of the largest value; at most {TOLERANCE} is rounding"
        )
    return largest


def main() -> int:
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
