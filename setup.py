"""Packaging. The exp files and the command lines travel inside the package as ``mmdet.exps`` and ``mmdet.tools``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
TOOLS = ("train", "eval", "track", "export")

setup(
    name="mmdet-exp",
    version=re.search(r'^__version__ = "(.+)"', (ROOT / "mmdet" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1],
    description="An experiment-class object-detection trainer: small Exp files, COCO AP, checkpoints that resume exactly.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["mmdet", "mmdet.*"]), "mmdet.exps", "mmdet.tools"],
    package_dir={"mmdet.exps": "exps", "mmdet.tools": "tools"},
    install_requires=[
        "torch>=2.4",
        "torchvision>=0.19",
        "numpy>=1.24",
        "opencv-python>=4.8",
        "pycocotools>=2.0.7",
        "faster-coco-eval>=1.6",
        "loguru>=0.7",
        "rich>=13",
        "tensorboard>=2.14",
    ],
    extras_require={
        "test": ["pytest>=8", "ruff>=0.6"],
        "export": ["onnx>=1.16", "onnxruntime>=1.18", "onnxscript>=0.1"],
        "plots": ["matplotlib>=3.8"],
    },
    entry_points={"console_scripts": [f"mmdet-{name} = mmdet.tools.{name}:main" for name in TOOLS]},
)
