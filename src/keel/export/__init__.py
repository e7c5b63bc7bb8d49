"""A trained model as something that runs without Keel and without torch."""

from __future__ import annotations

from keel.export.onnx import describe, export_onnx
from keel.export.step import DecodingStep, Port

__all__ = ["DecodingStep", "Port", "describe", "export_onnx"]
