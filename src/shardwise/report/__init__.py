"""Self-contained HTML pages: styles and charts inline, nothing fetched from anywhere."""

from __future__ import annotations

from shardwise.report.training import TrainingReport

__all__ = ["TrainingReport"]
