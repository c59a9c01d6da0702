"""The output of a prediction job: its files, and the metrics over all parts."""

from headrace.trainer.predict.metric_inputs import compute_metrics
from headrace.trainer.predict.output_files import DEAD_LETTERS, METRICS, PartMark, PredictionOutput, part_name

__all__ = ["DEAD_LETTERS", "METRICS", "PartMark", "PredictionOutput", "compute_metrics", "part_name"]
