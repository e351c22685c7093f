"""Requests, their scheduling, and the step that serves them. Knows no model family and no drafter."""
