"""Judging models: what an evaluator is, COCO's average precision, and how its results are shown."""

from mmdet.core.failure import RankError, compute_on_main, gather_from_ranks
from mmdet.evaluators.coco import CocoEvaluator, judge_results
from mmdet.evaluators.evaluator import Evaluation, Evaluator, evaluation_mode
from mmdet.evaluators.judge import judge
from mmdet.evaluators.pictures import draw_comparison, draw_detections, save_image
from mmdet.evaluators.report import format_per_class, format_summary
from mmdet.evaluators.results import Results

__all__ = [
    "CocoEvaluator",
    "Evaluation",
    "Evaluator",
    "RankError",
    "Results",
    "compute_on_main",
    "draw_comparison",
    "draw_detections",
    "evaluation_mode",
    "format_per_class",
    "format_summary",
    "gather_from_ranks",
    "judge",
    "judge_results",
    "save_image",
]
